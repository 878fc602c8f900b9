"""Handshake of two tasks before TensorFlow starts: each learns task and cluster of the other."""

import dataclasses
import errno
import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any, Self

from keras_psplus import versions
from keras_psplus.cluster.channel import (
    BUSY,
    CA,
    CERT,
    Authenticator,
    ChannelClient,
    ChannelError,
    ChannelServer,
    JobSecret,
    RefusedError,
    Session,
    Tls,
    speaks_tls,
)
from keras_psplus.cluster.config import TaskConfig, split_address
from keras_psplus.cluster.environment import TOKEN_VARIABLE

# Identities of processes: which task, in which cluster, on which host.

_LONGEST_CLUSTER = 2000  # characters; beyond, a digest says as well whether two are the same
_LONGEST_NAME = 255  # characters of a host, by the rules of DNS


@dataclasses.dataclass(frozen=True)
class PeerIdentity:
    """Identity of a process: its task, its cluster, and a unique id.

    Attributes:
        all_here: Whether it has found all tasks that the job waits for.
        is_proven: Whether it has proved that it knows the job's secret.
        versions: Those that all tasks need to have in common; "" if they are not known.
    """

    task: str
    cluster: str
    host: str
    pid: int
    process: str
    all_here: bool = False
    is_proven: bool = True
    versions: str = ""

    @classmethod
    def of(cls, config: TaskConfig) -> Self:
        cluster = json.dumps(config.cluster, sort_keys=True)
        if len(cluster) > _LONGEST_CLUSTER:
            digest = hashlib.sha256(cluster.encode()).hexdigest()[:16]
            cluster = f"{len(config.tasks())} tasks (digest {digest} of their addresses)"
        host, pid, process = socket.gethostname(), os.getpid(), uuid.uuid4().hex
        return cls(config.name, cluster, host, pid, process, versions=versions.summary())

    @classmethod
    def of_chief(cls) -> Self:
        """Makes the identity of a chief without a `TaskConfig`."""
        return cls("chief", "{}", socket.gethostname(), os.getpid(), uuid.uuid4().hex)

    @property
    def who(self) -> str:
        """Names the process for a message."""
        return f"{self.task} (process {self.pid} on {self.host})"

    def encode(self) -> str:
        fields = dataclasses.asdict(self)
        del fields["is_proven"]
        return json.dumps(fields)

    @classmethod
    def decode(cls, text: str, is_proven: bool) -> Self | None:
        """Reads the identity in `text`; None if no task could have sent it."""
        fields = json_object(text)
        pid, all_here = fields.get("pid"), fields.get("all_here")
        texts = [fields.get(key) for key in ("task", "cluster", "host", "process", "versions")]
        # Printable: a terminal must not obey what a stranger has sent.
        good = all(isinstance(text, str) and text.isprintable() for text in texts)
        if not good or type(pid) is not int or not 0 <= pid < 2**32 or type(all_here) is not bool:
            return None
        task, cluster, host, process, installed = (str(text) for text in texts)
        if max(len(task), len(host), len(process), len(installed)) > _LONGEST_NAME:
            return None
        return cls(task, cluster, host, pid, process, all_here, is_proven, installed)


def conflict(mine: PeerIdentity, theirs: PeerIdentity, expected: str | None = None) -> str | None:
    """Says why two processes cannot be in one cluster.

    Args:
        expected: Name of the task that should be at the dialled address.

    Returns:
        A sentence that names both, or `None` if all is well.
    """
    if theirs.process == mine.process:
        return None
    if not theirs.is_proven:
        return (
            f"{mine.who} and {theirs.who} were started with different clusters, or one of them "
            f"with a {TOKEN_VARIABLE}: {mine.task} has {mine.cluster}. "
            "Give every task the same 'cluster' in TF_CONFIG, and the same token or none"
        )
    if theirs.cluster != mine.cluster:
        return (
            f"{mine.who} and {theirs.who} were started with different clusters: "
            f"{mine.task} has {mine.cluster}, {theirs.task} has {theirs.cluster}. "
            "Give every task the same 'cluster' in TF_CONFIG"
        )
    if theirs.task == mine.task:
        return (
            f"two processes claim to be {mine.task}: {mine.who} and {theirs.who}. "
            "Give every process its own 'task' in TF_CONFIG"
        )
    if expected is not None and theirs.task != expected:
        return (
            f"{mine.who} found {theirs.who} at the address of {expected}. "
            "Start every task on the host that its address names"
        )
    if "" not in (mine.versions, theirs.versions) and theirs.versions != mine.versions:
        return (
            f"{mine.who} and {theirs.who} have different versions: {mine.task} has "
            f"{mine.versions}, {theirs.task} has {theirs.versions}. "
            "Install the same ones on all machines"
        )
    return None


def json_object(text: str | bytes) -> dict[str, Any]:
    """Returns the object in a JSON text; an empty one if there is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# Probe of a gRPC server's port: it answers, is silent, or is gone.
#
# TensorFlow's servers have no control channel that keepalive could watch, and the kernel of a
# stopped process goes on accepting connections. So each probe connects again, and the server has to
# speak first, as gRPC's do.

ANSWERS, SILENT, GONE = "answers", "silent", "gone"
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
Place = tuple[socket.AddressFamily, tuple[Any, ...]]


def places_of(address: str) -> list[Place]:
    """Looks up an address."""
    try:
        host, port = split_address(address)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return []
    return [(family, place) for family, *_, place in found]


def state_of(places: Sequence[Place], timeout: float) -> str:
    """State of the server at one of some places: `ANSWERS`, `SILENT` or `GONE`.

    A silent one hangs, or is cut off. A refused connection says that the server has ended.
    """
    state = GONE
    for family, place in places:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(timeout)
                connection.connect(place)
                # As in `connect`, a socket may be connected to itself.
                if connection.getsockname() != place and connection.recv(1):
                    return ANSWERS
        except TimeoutError:
            state = SILENT
        except OSError as error:
            if error.errno in _UNREACHABLE:
                state = SILENT
    return state


def is_silent(places: Sequence[Place], timeout: float) -> bool:
    """Whether the server there is silent; see `state_of`."""
    return state_of(places, timeout) == SILENT


# Handshake of two tasks before TensorFlow starts: each learns task and cluster of the other.
#
# A task listens on its address and calls its peers', by the control channel. Other programs that
# answer there (TensorFlow's gRPC server, a port scanner) are recognised by how they answer.

ANSWER_TIMEOUT = 2.0  # a peer that accepts and stays silent runs another server: it is up

REFUSED = "connection refused (not started yet, or it has failed)"


class TlsError(OSError):
    """One of two tasks speaks no TLS, or does not trust the other."""


class StrangerError(OSError):
    """A process answers that does not know this job's secret."""

    def __init__(self) -> None:
        super().__init__(
            f"what answers there does not know this job's secret ({TOKEN_VARIABLE} differs, or it "
            "is another job)"
        )


def dial(
    address: str, mine: PeerIdentity, job: JobSecret, timeout: float = 2.0
) -> PeerIdentity | None:
    """Calls a task and says who this is.

    Returns:
        The `PeerIdentity` of a task that is waiting too; `None` if another server
        (TensorFlow's) accepted. Without a token it may be an unproven one: of a task that was
        started with another cluster.
    """
    own_tls = Tls.from_env()
    connect(address, timeout).close()
    with ChannelClient(address, own_tls) as client:
        session = Session(job.secret, lambda text: client.send(text, ANSWER_TIMEOUT))
        has_answered = False
        try:
            stranger = session.open()
            has_answered = True
            return PeerIdentity.decode(session.ask(mine.encode()), True)
        except RefusedError:
            unproven = None if job.is_token else PeerIdentity.decode(stranger, False)
            if unproven is None:
                raise StrangerError from None
            return unproven
        except ChannelError as error:
            if has_answered or error.code == BUSY:
                reason = "it is busy with others" if error.code == BUSY else "it stopped answering"
                raise OSError(reason) from None
            if error.code in ("UNIMPLEMENTED", "DEADLINE_EXCEEDED"):
                return None
            if explain_tls(address, own_tls, str(error)):
                return None
            # A listener that has just ended; its TensorFlow server comes up there in a moment.
            raise ConnectionResetError("it closed the connection") from None


def explain_tls(address: str, own: Tls | None, met: str) -> bool:
    """Raises if a server breaks calls off because of TLS.

    Returns:
        Whether it is a server that knows nothing of this library, such as TensorFlow's.
    """
    if speaks_tls(address, ANSWER_TIMEOUT):
        if own is None:
            raise TlsError(f"it speaks TLS, and this task does not: set {CERT} here, too")
        reason = met.rpartition("last error: ")[2].partition("\n")[0][:200]
        raise TlsError(
            f"the TLS handshake failed: see that {CERT} and {CA} of both tasks go together "
            f"({reason})"
        )
    if own is not None:
        with ChannelClient(address, None) as client:
            try:
                client.send(json.dumps({"open": ""}), ANSWER_TIMEOUT)
            except ChannelError as plain:
                if plain.code in ("UNIMPLEMENTED", "DEADLINE_EXCEEDED"):
                    return True
            else:
                raise TlsError(f"it does not speak TLS, and this task does: set {CERT} there")
    return False


def connect(address: str, timeout: float) -> socket.socket:
    """Opens a TCP connection to `host:port`; errors name the cause in plain words."""
    try:
        connection = socket.create_connection(split_address(address), timeout=max(timeout, 0.05))
    except socket.gaierror:
        raise OSError("its host name does not resolve") from None
    except TimeoutError:
        raise OSError("no answer (host down, or a firewall drops the packets)") from None
    except ConnectionRefusedError:
        raise ConnectionRefusedError(REFUSED) from None
    if connection.getsockname() == connection.getpeername():
        # TCP connects a socket to itself when the dialled local port is free and happens to be
        # chosen as the source port.
        connection.close()
        raise ConnectionRefusedError(REFUSED)
    return connection


def listens(address: str, timeout: float = 2.0) -> bool:
    """Whether a TCP connection to `host:port` is accepted."""
    try:
        connect(address, timeout).close()
    except (OSError, ValueError):
        return False
    return True


def grpc_responds(address: str, timeout: float) -> bool:
    """Whether a gRPC server answers, which speaks first."""
    places = places_of(address)
    return state_of(places, timeout) == ANSWERS


def tensorflow_responds(address: str, timeout: float) -> bool:
    """Whether TensorFlow's server answers, and no `listener.Listener` that waits for it."""
    if not grpc_responds(address, timeout):
        return False
    with ChannelClient(address, None) as client:
        try:
            client.send("{}", timeout)
        except ChannelError as error:
            return error.code == "UNIMPLEMENTED"
    return False


# Answers handshakes on a task's own address, also while others connect and send anything.


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
