"""Checks of this task's address: it is on this machine, and its port is free."""

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable

from keras_psplus.cluster import handshake
from keras_psplus.cluster.channel.sessions import JobSecret
from keras_psplus.cluster.config import ClusterStartupError, TaskConfig, split_address
from keras_psplus.cluster.handshake import Listener, PeerIdentity
from keras_psplus.cluster.ports import port_holder

DNS_PATIENCE = 20.0  # seconds; a Kubernetes pod's own name may resolve only after a while


def listen_on_own_address(
    config: TaskConfig, mine: PeerIdentity, patience: float, log: Callable[[str], None]
) -> Listener:
    """Answers handshakes on the task's own port, on all interfaces as TensorFlow does.

    Args:
        patience: Seconds that the host name may take to resolve.

    Raises:
        ClusterStartupError: If that is not possible; the message says why.
    """
    check_own_address(config, mine, patience, log)
    assert config.address is not None
    _, port = split_address(config.address)
    try:
        return Listener(port, mine, JobSecret.of(config))
    except OSError:
        taken = OSError(errno.EADDRINUSE, "")  # since it has been checked
        raise _cannot_bind(config, mine, port, taken) from None


def check_own_address(
    config: TaskConfig, mine: PeerIdentity, patience: float, log: Callable[[str], None]
) -> None:
    """Checks that the task's own port can be listened on, as `listen_on_own_address` does it."""
    assert config.address is not None
    host, port = split_address(config.address)
    family = _resolve_own(config, host, patience)
    if not is_local(host):
        if _is_literal(host):
            raise ClusterStartupError(
                f"The address of {config.name}, {config.address}, is not on this machine "
                f"({socket.gethostname()}). Start {config.name} on the machine with that address, "
                f"or correct TF_CONFIG. Received: TF_CONFIG={config.to_tf_config()}"
            )
        log(
            f"the name {host!r} of {config.name} leads to another address than this machine's "
            "(fine behind a Kubernetes service, otherwise this task runs on the wrong host)"
        )
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            raise _cannot_bind(config, mine, port, error) from None


def _cannot_bind(
    config: TaskConfig, mine: PeerIdentity, port: int, error: OSError
) -> ClusterStartupError:
    received = f"Received: TF_CONFIG={config.to_tf_config()}"
    if error.errno != errno.EADDRINUSE:
        return ClusterStartupError(
            f"{config.name} cannot listen on {config.address}: {error.strerror}. Choose another "
            f"port (above 1023). {received}"
        )
    holder = port_holder(port) or "another process"
    try:
        theirs = handshake.dial(f"127.0.0.1:{port}", mine, JobSecret.of(config))
    except OSError:
        theirs = None
    if theirs is not None:
        holder = f"{theirs.who}, a task that was started already,"
    advice = (
        "It may be a second process with the same task, or one left over from an earlier run: end "
        "it, or choose another port."
    )
    if holder.startswith(f"process {os.getpid()} "):
        advice = (
            "That is this process: the server of a strategy stays while it runs. Make one strategy "
            "for each process, and all models under it."
        )
    return ClusterStartupError(
        f"{config.name} cannot listen on {config.address}: {holder} uses the port. {advice} "
        f"{received}"
    )


def _resolve_own(config: TaskConfig, host: str, patience: float) -> socket.AddressFamily:
    deadline = time.monotonic() + patience
    while True:
        try:
            return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ClusterStartupError(
                    f"The host name {host!r} in the address of {config.name} does not resolve "
                    f"({error}). Use a name that every task can resolve, or an IP address. "
                    f"Received: TF_CONFIG={config.to_tf_config()}"
                ) from None
        time.sleep(min(1.0, max(deadline - time.monotonic(), 0.0)))


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_local(host: str) -> bool:
    """Whether one of the host's addresses is this machine's: only those can be bound."""
    try:
        resolved = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in resolved:
        with socket.socket(family, kind, protocol) as trial:
            try:
                trial.bind(address)
                return True
            except OSError:
                continue
    return False
