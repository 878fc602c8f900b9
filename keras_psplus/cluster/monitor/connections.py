"""This process's TCP connections, also TensorFlow's: what the kernel counts, and their end."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Mapping

from keras_psplus.cluster.wire import unresponsive

# Of Linux's `struct tcp_info`, which only grows at its end.
_ACKED, _BUSY_US, _SIZE = 120, 168, 192
# Local and remote address, and what was acknowledged: bytes, and seconds with data under way.
_Key = tuple[tuple[str, int], tuple[str, int]]


class PeerConnections:
    """Totals of sending by peer, of connections that come and go.

    Args:
        addresses: Dict from names of the peers to their `host:port`.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._names: dict[str, str | None] = {}
        for name, address in addresses.items():
            host = address.rpartition(":")[0].strip("[]")
            with contextlib.suppress(OSError):
                for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
                    ip = str(found[4][0])
                    # Peers of one host cannot be told apart.
                    self._names[ip] = None if ip in self._names else name
        self._last: dict[_Key, tuple[float, float]] = {}
        self._totals: dict[str, tuple[float, float]] = {}

    def totals(self) -> dict[str, tuple[float, float]]:
        """Bytes sent and seconds of sending by peer, if it has its own host."""
        if not any(self._names.values()):
            return {}
        now = _connections()
        for key, (sent, busy) in now.items():
            name = self._names.get(key[1][0])
            if name is None:
                continue
            before, total = self._last.get(key, (0.0, 0.0)), self._totals.get(name, (0.0, 0.0))
            changed = max(0.0, sent - before[0]), max(0.0, busy - before[1])
            self._totals[name] = total[0] + changed[0], total[1] + changed[1]
        self._last = now
        return dict(self._totals)


def cut(address: str) -> None:
    """Breaks this process's connections to an address, so that calls there fail.

    Args:
        address: The `host:port` that they lead to.
    """
    places = {_plain(place[:2]) for _, place in unresponsive.places_of(address)}
    for one, (_, peer) in _sockets():
        if peer in places:
            with contextlib.suppress(OSError):  # It has ended by itself.
                one.shutdown(socket.SHUT_RDWR)


def _connections() -> dict[_Key, tuple[float, float]]:
    found = {}
    for one, key in _sockets():
        with contextlib.suppress(OSError, struct.error):
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
            (acked,) = struct.unpack_from("Q", info, _ACKED)
            (busy,) = struct.unpack_from("Q", info, _BUSY_US)
            found[key] = float(acked), busy * 1e-6
    return found


def _sockets() -> Iterator[tuple[socket.socket, _Key]]:
    """Copies of this process's connected sockets, with their local and remote addresses."""
    with contextlib.suppress(OSError):  # not Linux
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, ValueError):
                if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                    continue
                with _copy_of(int(number)) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6):
                        yield one, (one.getsockname()[:2], _plain(one.getpeername()[:2]))


def _copy_of(number: int) -> socket.socket:
    copied = os.dup(number)
    try:
        return socket.socket(fileno=copied)
    except OSError:
        os.close(copied)
        raise


def _plain(address: tuple[str, int]) -> tuple[str, int]:
    """An address without the prefix of IPv4 over IPv6, as gRPC's sockets have it."""
    return address[0].removeprefix("::ffff:"), address[1]
