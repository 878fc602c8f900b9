"""Answers handshakes on a task's own address, also while others connect and send anything."""

import dataclasses
import threading
import time

from keras_psplus.cluster.channel.server import ChannelServer
from keras_psplus.cluster.channel.sessions import Authenticator, JobSecret
from keras_psplus.cluster.wire.identity import PeerIdentity, conflict

# Hosts of strangers that are named, and seconds between two of them that wake who waits.
_MOST_STRANGERS, _WAKING = 8, 0.3


class Listener:
    """Answers handshakes on a port until closed.

    Callers that do not prove that they know the job's secret are not listened to: whatever they
    send ends their own call and no more.

    Args:
        port: The port, on all interfaces as TensorFlow's server is.

    Attributes:
        identity: The same; what is answered from now on.

    Raises:
        OSError: If it cannot listen there.
    """

    def __init__(self, port: int, mine: PeerIdentity, job: JobSecret) -> None:
        self.problem: str | None = None  # the first conflict that a caller brought
        self.callers: set[str] = set()  # names of the tasks that have called and got an answer
        self.callers_from: dict[str, str] = {}  # the hosts from which they have called
        self.heard_all_here = False  # one of them has found all tasks
        self.strangers: list[str] = []  # the first hosts that have called without the secret
        self.changed = threading.Event()
        self.identity, self._job = mine, job
        self._next_waking = 0.0
        gate = Authenticator(job.secret, "")
        self._server = ChannelServer(
            f"[::]:{port}", gate, self._answer, self._hint, self._note_stranger
        )

    def note_of_strangers(self) -> str:
        """Names the hosts that have called without the secret, for the end of a sentence."""
        if not self.strangers:
            return ""
        hosts = ", ".join(self.strangers)
        return f" (not listened to, as they do not know this job's secret: {hosts})"

    def close(self) -> None:
        """Stops listening, within a second; the port is free when this returns."""
        self._server.close()

    def _hint(self) -> str | None:
        # A task that was started with another cluster learns that, and no address.
        return (
            None if self._job.is_token else dataclasses.replace(self.identity, cluster="").encode()
        )

    def _answer(self, body: str, host: str) -> str:
        mine, theirs = self.identity, PeerIdentity.decode(body, True)
        if theirs is not None:
            self.problem = self.problem or conflict(mine, theirs)
            self.callers.add(theirs.task)
            self.callers_from[theirs.task] = host
            self.heard_all_here = self.heard_all_here or theirs.all_here
            self.changed.set()
        return mine.encode()

    def _note_stranger(self, host: str) -> None:
        if host not in self.strangers and len(self.strangers) < _MOST_STRANGERS:
            self.strangers.append(host)
        if not self._job.is_token and time.monotonic() >= self._next_waking:
            # It may be a task of this cluster with another TF_CONFIG. What is at the task's
            # address is asked, not the caller.
            self._next_waking = time.monotonic() + _WAKING
            self.changed.set()
