"""Handshake of two tasks before TensorFlow starts: one line with task and cluster.

A task listens on its address and connects to its peers'. Other programs that answer there
(TensorFlow's gRPC server, a port scanner) are recognised by their bytes.
"""

import dataclasses
import hashlib
import json
import os
import socket
import uuid
from typing import Self

from keras_psplus.cluster.config import TaskConfig, split_address

_MAGIC = b"keras-psplus hello 1 "
_MAX_LINE = 65536
_LONGEST_CLUSTER = 2000  # characters; beyond, a digest says as well whether two are the same
ANSWER_TIMEOUT = 1.0  # a peer that accepts and stays silent runs another server: it is up


@dataclasses.dataclass(frozen=True)
class PeerIdentity:
    """Identity of a process: its task, its cluster, and a unique id.

    Attributes:
        all_here: Whether it has found all tasks that the job waits for.
    """

    task: str
    cluster: str
    host: str
    pid: int
    process: str
    all_here: bool = False

    @classmethod
    def of(cls, config: TaskConfig) -> Self:
        """Makes this process's identity from its `TaskConfig`."""
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

    def encode(self) -> bytes:
        """Returns the identity as one line of bytes."""
        return _MAGIC + json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Self | None:
        """Returns the identity in `line`, or `None` if it is none."""
        if not line.startswith(_MAGIC) or not line.endswith(b"\n"):
            return None
        try:
            fields = json.loads(line[len(_MAGIC) :])
            texts = (str(fields[key]) for key in ("task", "cluster", "host"))
            return cls(  # type: ignore[misc]
                *texts,  # type: ignore[arg-type]
                pid=int(fields["pid"]),
                process=str(fields["process"]),
                all_here=bool(fields.get("all_here")),
            )
        except (ValueError, KeyError, TypeError):
            return None


def conflict(mine: PeerIdentity, theirs: PeerIdentity, expected: str | None = None) -> str | None:
    """Says why two processes cannot be in one cluster.

    Args:
        mine: This process's `PeerIdentity`.
        theirs: The other's.
        expected: Name of the task that should be at the dialled address.

    Returns:
        A sentence that names both, or `None` if all is well.
    """
    if theirs.process == mine.process:
        return None
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


def dial(address: str, mine: PeerIdentity, timeout: float = 2.0) -> PeerIdentity | None:
    """Calls a task and says hello.

    Args:
        address: The task's `host:port`.
        mine: This process's `PeerIdentity`.
        timeout: Seconds that connecting may take.

    Returns:
        The `PeerIdentity` of a task that is waiting too; `None` if another server
        (TensorFlow's) accepted.

    Raises:
        OSError: If nobody is there; the message says how it showed.
    """
    with connect(address, timeout) as connection:
        connection.settimeout(ANSWER_TIMEOUT)
        try:
            connection.sendall(mine.encode())
            line = _read_line(connection)
        except TimeoutError:
            return None
        if not line:
            # It closed without a word: a listener that has just ended; its TensorFlow server
            # comes up on the same port in a moment.
            raise ConnectionResetError("it closed the connection")
        return PeerIdentity.decode(line)


def connect(address: str, timeout: float) -> socket.socket:
    """Opens a TCP connection to `host:port`; errors name the cause in plain words."""
    try:
        connection = socket.create_connection(split_address(address), timeout=max(timeout, 0.05))
    except socket.gaierror:
        raise OSError("its host name does not resolve") from None
    except TimeoutError:
        raise OSError("no answer (host down, or a firewall drops the packets)") from None
    except ConnectionRefusedError:
        raise OSError("connection refused (not started yet, or it has failed)") from None
    if connection.getsockname() == connection.getpeername():
        # TCP connects a socket to itself when the dialled local port is free and happens to be
        # chosen as the source port.
        connection.close()
        raise OSError("connection refused (not started yet, or it has failed)")
    return connection


def grpc_responds(address: str, timeout: float) -> bool:
    """Whether a gRPC server answers: it speaks first, a waiting `listener.Listener` does not."""
    try:
        with connect(address, timeout) as connection:
            connection.settimeout(timeout)
            return bool(connection.recv(1))
    except OSError:
        return False


def is_whole(line: bytes) -> bool:
    """Whether a line has been read completely: it has its end, or is no hello."""
    is_hello = line.startswith(_MAGIC[: len(line)])
    return line.endswith(b"\n") or len(line) >= _MAX_LINE or not is_hello


def _read_line(connection):
    line = b""
    while not is_whole(line):
        chunk = connection.recv(4096)
        if not chunk:
            break
        line += chunk
    return line
