"""TLS of the control channel, by the files that the environment names.

With a certificate authority both ends show certificates that it has signed (mutual TLS). Without
one, all tasks have the same certificate, which is the one that they trust.
"""

import contextlib
import dataclasses
import functools
import os
import socket
import ssl
import threading
from types import ModuleType
from typing import Any, NoReturn, Self

from keras_psplus.cluster.config import ClusterConfigError, split_address

# The module `grpc`, imported when the first channel is made.
#
# It is another copy of gRPC than TensorFlow's own, in the same process. A process that has forked
# (`process/warm.py`) has not imported it.


# Read once, by gRPC's core. It would say on stderr what is said in errors here, and would look
# after channels at each fork of the process: none of ours is used across one.
_AT_IMPORT = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}
_lock = threading.Lock()


def load() -> Any:
    """Imports `grpc`; the environment stays as it is.

    Raises:
        RuntimeError: In a fork of a process that has used it, whose threads are not here: it would
            wait for them without end.
    """
    with _lock:  # Two threads at once would take each other's environment for the user's.
        module, pid = _load()
    if pid != os.getpid():
        raise RuntimeError(
            f"Process {os.getpid()} is a fork of one that has joined a cluster, and cannot join "
            "another. Fork before the strategy is made, or start a new process (`spawn`). "
            f"Received: a fork of process {pid}"
        )
    return module


@functools.cache
def _load() -> tuple[ModuleType, int]:
    added = {name: value for name, value in _AT_IMPORT.items() if name not in os.environ}
    os.environ.update(added)
    try:
        import grpc
    finally:
        for name in added:
            del os.environ[name]
    return grpc, os.getpid()


CERT, KEY, CA = "KERAS_PSPLUS_TLS_CERT", "KERAS_PSPLUS_TLS_KEY", "KERAS_PSPLUS_TLS_CA"
# Name in all certificates; without it, each has the host's in its task's address.
NAME = "KERAS_PSPLUS_TLS_NAME"


@dataclasses.dataclass(frozen=True)
class Tls:
    """Contents of the files of one process.

    Attributes:
        cert: This task's certificate, with those that lead to the authority.
        ca: Certificates of the authority; None without one.
        name: Name in all certificates; None if each has its host's.
    """

    cert: bytes
    key: bytes = dataclasses.field(repr=False)
    ca: bytes | None
    name: str | None

    @classmethod
    def from_env(cls) -> Self | None:
        """Reads the files that the environment names; None if it names none.

        Raises:
            ClusterConfigError: If one is missing, cannot be read, or does not go with the others.
        """
        paths = {name: os.environ.get(name, "") for name in (CERT, KEY, CA)}
        given = {**paths, NAME: os.environ.get(NAME, "")}
        received = "Received: " + ", ".join(f"{name}={text}" for name, text in given.items())
        if not any(given.values()):
            return None
        for name in (CERT, KEY):
            if not paths[name]:
                raise ClusterConfigError(
                    f"{name} is not set: TLS takes a certificate and its key ({CERT}, {KEY}), and "
                    f"{CA} for certificates of an authority. {received}"
                )
        contents = {name: _read(name, path, received) for name, path in paths.items() if path}
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                paths[CERT], paths[KEY], password=_no_password
            )
        except (ssl.SSLError, ValueError) as error:
            raise ClusterConfigError(
                f"{CERT} and {KEY} must be a certificate and its own key, in PEM files without a "
                f"password: {getattr(error, 'reason', None) or error}. {received}"
            ) from None
        try:
            ssl.create_default_context(cafile=paths[CA] or paths[CERT])
        except ssl.SSLError as error:
            raise ClusterConfigError(
                f"{CA} must be a PEM file of certificates: {error.reason or error}. {received}"
            ) from None
        return cls(contents[CERT], contents[KEY], contents.get(CA), given[NAME] or None)

    def of_server(self) -> Any:
        """Returns gRPC's credentials of a server."""
        return load().ssl_server_credentials(
            [(self.key, self.cert)],
            root_certificates=self.ca,
            require_client_auth=self.ca is not None,
        )

    def of_caller(self) -> Any:
        """Returns gRPC's credentials of a caller."""
        return load().ssl_channel_credentials(self.ca or self.cert, self.key, self.cert)


def is_spoken_at(address: str, timeout: float) -> bool:
    """Whether what listens at `host:port` answers a TLS handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(OSError):
        with socket.create_connection(split_address(address), timeout) as connection:
            with context.wrap_socket(connection):
                return True
    return False


def _read(name: str, path: str, received: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ClusterConfigError(
            f"The file in {name} cannot be read: {error.strerror}. {received}"
        ) from None


def _no_password() -> NoReturn:
    raise ValueError("the key has a password")
