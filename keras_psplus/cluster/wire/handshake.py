"""Handshake of two tasks before TensorFlow starts: one line with task and cluster.

A task listens on its address and connects to its peers'. Other programs that answer there
(TensorFlow's gRPC server, a port scanner) are recognised by their bytes.
"""

import socket
import time

from keras_psplus.cluster.config import split_address
from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.cluster.wire import hello
from keras_psplus.cluster.wire.hello import JobSecret
from keras_psplus.cluster.wire.identity import PeerIdentity

ANSWER_TIMEOUT = 1.0  # a peer that accepts and stays silent runs another server: it is up


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
    """Calls a task and says hello.

    Args:
        address: The task's `host:port`.
        mine: This process's `PeerIdentity`.
        job: The job's `JobSecret`.
        timeout: Seconds that connecting may take.

    Returns:
        The `PeerIdentity` of a task that is waiting too; `None` if another server
        (TensorFlow's) accepted. Without a token it may be an unproven one: of a task that was
        started with another cluster.

    Raises:
        StrangerError: If a task of another job answers, and this one has a token.
        OSError: If nobody is there; the message says how it showed.
    """
    with connect(address, timeout) as connection:
        deadline = time.monotonic() + ANSWER_TIMEOUT
        nonce = hello.new_nonce()
        try:
            connection.settimeout(ANSWER_TIMEOUT)
            connection.sendall(hello.line_of(nonce=nonce))
            line = _read_line(connection, deadline)
        except TimeoutError:
            return None
        if not line:
            # It closed without a word: a listener that has just ended; its TensorFlow server
            # comes up on the same port in a moment.
            raise ConnectionResetError("it closed the connection")
        theirs = hello.fields_of(line, "nonce")
        if theirs is None:
            return None
        try:
            connection.sendall(hello.introduction(mine, job, hello.CALLER, (nonce, *theirs)))
            line = _read_line(connection, deadline)
        except TimeoutError:
            raise OSError("it stopped answering") from None
        except OSError:
            line = b""  # It hangs up on strangers.
        identity = hello.introduced(line, job, hello.LISTENER, (nonce, *theirs))
        if identity is None or (job.is_token and not identity.is_proven):
            raise StrangerError
        return identity


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


def _read_line(connection, deadline):
    line = b""
    while not hello.is_whole(line):
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        chunk = connection.recv(4096)
        if not chunk:
            break
        line += chunk
    return line
