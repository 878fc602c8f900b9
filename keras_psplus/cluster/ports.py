"""Free TCP ports for the tasks of a local cluster."""

import collections
import glob
import os
import random
import socket
import time
from collections.abc import Sequence

_LOWEST, _HIGHEST = 10000, 65535
_EPHEMERAL_FILE = "/proc/sys/net/ipv4/ip_local_port_range"
_TRIES_PER_PORT = 200
_TO_CONTROL = 1000
# Seconds within which the servers of a launcher have begun to listen, and sockets until then.
_RESERVED_SECONDS = 120.0
_reserved: collections.deque[tuple[float, int]] = collections.deque()


def control_port(port: int) -> int:
    """Returns the port of a serving task's control channel, by that of TensorFlow."""
    return port + _TO_CONTROL if port + _TO_CONTROL <= _HIGHEST else port - _TO_CONTROL


def control_address(address: str) -> str:
    """Returns `host:port` of the control channel, by a task's own."""
    host, _, port = address.rpartition(":")
    return f"{host}:{control_port(int(port))}"


def free_ports(n: int, host: str = "127.0.0.1") -> list[int]:
    """Finds distinct free TCP ports for servers that start a little later.

    The ports of their control channels are free, too.

    Ports outside the ephemeral range are preferred: the kernel hands
    ephemeral ports to outgoing connections of any process, which could take
    one between this choice and the server's bind. Until it is over, this process
    reserves them: it holds the UDP ports of the same numbers, which others that
    choose here leave alone.
    """
    candidates = _candidates()
    chooser = random.SystemRandom()  # not `random`: a script's seed would repeat the choice
    ports: list[int] = []
    held: list[socket.socket] = []
    try:
        for _ in range(n * _TRIES_PER_PORT):
            if len(ports) == n:
                break
            port = chooser.choice(candidates) if candidates else 0
            bound = _bind(host, port)
            if bound is None:
                continue
            held.append(bound)  # keeps the next choices distinct
            number = bound.getsockname()[1]
            control = _bind(host, control_port(number))
            if control is not None:
                held.append(control)
                if _reserve(host, number):
                    ports.append(number)
    finally:
        for bound in held:
            bound.close()
    if len(ports) < n:
        raise RuntimeError(
            f"Found only {len(ports)} of {n} free TCP ports on this machine. Close other servers "
            f"or give the addresses yourself. Received: n={n}, host={host!r}"
        )
    return ports


def _candidates() -> Sequence[int]:
    low, high = _ephemeral_range()
    outside = {*range(_LOWEST, min(low, _HIGHEST + 1)), *range(high + 1, _HIGHEST + 1)}
    both = [port for port in outside if control_port(port) in outside]
    return both if len(both) >= 1000 else []  # too few: let the kernel choose


def _ephemeral_range() -> tuple[int, int]:
    try:
        with open(_EPHEMERAL_FILE) as file:
            low, high = map(int, file.read().split())
            return low, high
    except (OSError, ValueError):
        return 49152, 65535  # IANA's range


def _reserve(host: str, port: int) -> bool:
    """Reserves a port and its control channel's for a while; False if another has."""
    now = time.monotonic()
    while _reserved and now - _reserved[0][0] > _RESERVED_SECONDS:
        os.close(_reserved.popleft()[1])
    both = [_bind(host, one, socket.SOCK_DGRAM) for one in (port, control_port(port))]
    taken = [one for one in both if one is not None]
    if len(taken) == len(both):
        _reserved.extend((now, one.detach()) for one in taken)
        return True
    for one in taken:
        one.close()
    return False


def _bind(
    host: str, port: int, kind: socket.SocketKind = socket.SOCK_STREAM
) -> socket.socket | None:
    """Binds like TensorFlow's server (all interfaces); None if the port is taken."""
    try:
        family = socket.getaddrinfo(host, port, type=kind)[0][0]
        everywhere = socket.socket(family, kind)
    except OSError as error:
        raise RuntimeError(
            f"{host!r} cannot be used as a host: {error}. Received: host={host!r}"
        ) from None
    try:
        everywhere.bind(("", port))
        return everywhere
    except OSError:
        everywhere.close()
        return None


def port_holder(port: int) -> str | None:
    """Names the process that listens on a local port, as far as Linux tells."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    for links in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(links) in inodes:
                pid = links.split("/")[2]
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"process {pid} ({command[:80]})"
        except OSError:
            continue  # it ended meanwhile, or belongs to another user
    return None


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        listening = "0A"  # TCP_LISTEN
        inodes |= {
            f"socket:[{row[9]}]"
            for row in rows
            if row[3] == listening and int(row[1].rpartition(":")[2], 16) == port
        }
    return inodes
