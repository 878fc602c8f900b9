"""Identities of processes: which task, in which cluster, on which host."""

import dataclasses
import errno
import hashlib
import json
import os
import socket
import uuid
from collections.abc import Sequence
from typing import Any, Self

from keras_psplus.cluster.config import TaskConfig, split_address
from keras_psplus.cluster.environment import TOKEN_VARIABLE

_LONGEST_CLUSTER = 2000  # characters; beyond, a digest says as well whether two are the same
_LONGEST_NAME = 255  # characters of a host, by the rules of DNS


@dataclasses.dataclass(frozen=True)
class PeerIdentity:
    """Identity of a process: its task, its cluster, and a unique id.

    Attributes:
        all_here: Whether it has found all tasks that the job waits for.
        is_proven: Whether it has proved that it knows the job's secret.
    """

    task: str
    cluster: str
    host: str
    pid: int
    process: str
    all_here: bool = False
    is_proven: bool = True

    @classmethod
    def of(cls, config: TaskConfig) -> Self:
        cluster = json.dumps(config.cluster, sort_keys=True)
        if len(cluster) > _LONGEST_CLUSTER:
            digest = hashlib.sha256(cluster.encode()).hexdigest()[:16]
            cluster = f"{len(config.tasks())} tasks (digest {digest} of their addresses)"
        return cls(config.name, cluster, socket.gethostname(), os.getpid(), uuid.uuid4().hex)

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
        texts = [fields.get(key) for key in ("task", "cluster", "host", "process")]
        # Printable: a terminal must not obey what a stranger has sent.
        good = all(isinstance(text, str) and text.isprintable() for text in texts)
        if not good or type(pid) is not int or not 0 <= pid < 2**32 or type(all_here) is not bool:
            return None
        task, cluster, host, process = (str(text) for text in texts)
        if max(len(task), len(host), len(process)) > _LONGEST_NAME:
            return None
        return cls(task, cluster, host, pid, process, all_here, is_proven)


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
    """Looks up an address.

    Args:
        address: `host:port`.

    Returns:
        Families and addresses of sockets; none if nothing is known of it.
    """
    try:
        host, port = split_address(address)
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return []
    return [(family, place) for family, *_, place in found]


def state_of(places: Sequence[Place], timeout: float) -> str:
    """State of the server at one of some places: `ANSWERS`, `SILENT` or `GONE`.

    A silent one hangs, or is cut off. A refused connection says that the server has ended.

    Args:
        places: Those that `places_of` returns.
        timeout: Seconds that it has.
    """
    state = GONE
    for family, place in places:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(timeout)
                connection.connect(place)
                # As in `handshake.connect`, a socket may be connected to itself.
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
