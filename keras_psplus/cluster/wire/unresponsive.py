"""Tells a server that says nothing from one that is gone."""

import errno
import socket
from typing import Any

from keras_psplus.cluster.config import split_address

_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH)


def place_of(address: str) -> tuple[socket.AddressFamily, tuple[Any, ...]] | None:
    """Looks up an address.

    Args:
        address: `host:port`.

    Returns:
        Family and address of a socket; None if nothing is known of it.
    """
    try:
        host, port = split_address(address)
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError):
        return None
    return family, place


def is_silent(place: tuple[socket.AddressFamily, tuple[Any, ...]] | None, timeout: float) -> bool:
    """Whether a gRPC server's address is silent: the server hangs, or is cut off.

    A refused connection says that the server has ended, which is no silence.

    Args:
        place: What `place_of` returns. The server is to speak first, as gRPC's do.
        timeout: Seconds that it has.
    """
    if place is None:
        return False
    family, address = place
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(address)
            connection.recv(1)
    except TimeoutError:
        return True
    except OSError as error:
        return error.errno in _UNREACHABLE
    return False
