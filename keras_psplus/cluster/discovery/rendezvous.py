"""Rendezvous: processes exchange their hosts if they know the first one's only.

The others connect to the first process, at the address that it will have in the cluster, with the
handshake of tasks before TensorFlow starts (`handshake`); it reads their hosts from the
connections, and answers with all hosts once it knows them. Callers that do not know the job's
secret are ignored.
"""

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Callable

from keras_psplus.cluster import handshake
from keras_psplus.cluster.channel.sessions import JobSecret
from keras_psplus.cluster.config import ClusterConfigError, split_address
from keras_psplus.cluster.handshake import Listener, PeerIdentity
from keras_psplus.log import logger

_PAUSE, _LOG_EVERY = 0.3, 10.0
# For those that were told, to say that they have heard it.
_COURTESY = 10.0


def exchange_hosts(rank: int, size: int, address: str, timeout: float) -> tuple[str, ...]:
    """Returns the host of each rank; all ranks have to call this at once.

    Args:
        address: `host:port` of the first one. It listens there until all know.

    Raises:
        ClusterConfigError: If the others do not come, or the first one cannot be reached.

    Example:

    ```python
    exchange_hosts(1, 2, "10.0.0.1:29501", timeout=60)  # in both: ("10.0.0.1", "10.0.0.2")
    ```
    """
    mine = PeerIdentity(
        _name(rank), "", socket.gethostname(), os.getpid(), f"{os.getpid()}-{time.monotonic_ns()}"
    )
    # Without a token, what only processes of this job are likely to know together.
    job = JobSecret.of_text(f"rendezvous of {size} at {address}")
    wait = _Wait(rank, size, address, timeout)
    return _lead(mine, job, size, address, wait) if rank == 0 else _follow(mine, job, address, wait)


def _lead(
    mine: PeerIdentity, job: JobSecret, size: int, address: str, wait: "_Wait"
) -> tuple[str, ...]:
    host, port = split_address(address)
    try:
        listener = Listener(port, mine, job)
    except OSError:
        raise wait.error(f"{_name(0)} cannot listen on port {port}") from None
    others = [_name(rank) for rank in range(1, size)]
    try:
        while missing := [name for name in others if name not in listener.callers_from]:
            wait.pause(
                listener.changed.wait, f"{', '.join(missing)} to call{listener.note_of_strangers()}"
            )
            listener.changed.clear()
        hosts = (host, *(listener.callers_from[name] for name in others))
        listener.identity = dataclasses.replace(mine, cluster=",".join(hosts), all_here=True)
        deadline = time.monotonic() + _COURTESY
        told = {f"{name}, told" for name in others}
        while told - listener.callers and time.monotonic() < deadline:
            listener.changed.wait(_PAUSE)
            listener.changed.clear()
    finally:
        listener.close()
    return hosts


def _follow(mine: PeerIdentity, job: JobSecret, address: str, wait: "_Wait") -> tuple[str, ...]:
    while True:
        reason = "another server answers there"
        try:
            theirs = handshake.dial(address, mine, job)
            if theirs is not None and not theirs.is_proven:
                reason = str(handshake.StrangerError())
            elif theirs is not None and theirs.task == _name(0):
                if theirs.all_here:
                    break
                reason = "it waits for others"
        except OSError as error:
            reason = str(error)
        wait.pause(time.sleep, f"{_name(0)} at {address}: {reason}")
    with contextlib.suppress(OSError):
        handshake.dial(address, dataclasses.replace(mine, task=f"{mine.task}, told"), job)
    return tuple(theirs.cluster.split(","))


class _Wait:
    """Timeout of a rendezvous, and its log messages."""

    def __init__(self, rank: int, size: int, address: str, timeout: float) -> None:
        self._who, self._address = f"{_name(rank)} of {size}", address
        self._began, self._timeout = time.monotonic(), timeout
        self._next_log = self._began + _LOG_EVERY

    def pause(self, pause: Callable[[float], object], what: str) -> None:
        now = time.monotonic()
        if now - self._began >= self._timeout:
            raise self.error(f"waited {self._timeout:g} s for {what}")
        if now >= self._next_log:
            self._next_log += _LOG_EVERY
            logger.info("%s waits for %s", self._who, what)
        pause(_PAUSE)

    def error(self, reason: str) -> ClusterConfigError:
        return ClusterConfigError(
            f"{self._who} could not learn the hosts of the others: {reason}. Start all processes, "
            "see that all hosts reach that address (MASTER_ADDR, and the port after MASTER_PORT), "
            f"or set KERAS_PSPLUS_HOSTS or TF_CONFIG. Received: {self._address}"
        )


def _name(rank: int) -> str:
    return f"rank {rank}"
