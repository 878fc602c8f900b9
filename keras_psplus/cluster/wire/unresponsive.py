"""Probe of a gRPC server's port: it answers, is silent, or is gone.

TensorFlow's servers have no control channel that keepalive could watch, and the kernel of a stopped
process goes on accepting connections. So each probe connects again, and the server has to speak
first, as gRPC's do.
"""

import errno
import socket
from collections.abc import Sequence
from typing import Any

from keras_psplus.cluster.config import split_address

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
