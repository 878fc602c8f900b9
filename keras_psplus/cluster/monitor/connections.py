"""Bytes and seconds of sending over this process's TCP connections, as the kernel counts them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Mapping

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


def _connections() -> dict[_Key, tuple[float, float]]:
    found = {}
    with contextlib.suppress(OSError):  # not Linux
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, ValueError, struct.error):
                if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                    continue
                with _copy_of(int(number)) as one:
                    if one.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    key = one.getsockname()[:2], _plain(one.getpeername()[:2])
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
                    (acked,) = struct.unpack_from("Q", info, _ACKED)
                    (busy,) = struct.unpack_from("Q", info, _BUSY_US)
                    found[key] = float(acked), busy * 1e-6
    return found


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
