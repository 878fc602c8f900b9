"""Program that says what a host has, for `keras-psplus doctor --hosts`.

It is sent to the host's Python as text, so that it needs nothing there but that. It writes a line
of JSON with what there is, and listens on ports. Each line that it reads is `["reach", addresses]`,
`["trip", address]` or `["send", address]`, and it writes a line with what it has found.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

PACKAGES = "tensorflow keras numpy keras-psplus"
_SECONDS = 3.0
# Bytes after which a link has been measured, if that takes no longer than it may.
_MOST_BYTES, _PIECE = 32 << 20, 1 << 18
_TRIPS = 3


def _facts(ports: list[int], seconds: float) -> dict[str, object]:
    versions: dict[str, str | None] = {}
    for name in PACKAGES.split():
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    # As the command, it does not load TensorFlow.
    sys.argv[:] = ["keras-psplus"]
    try:
        import keras_psplus.versions

        versions["keras-psplus"] = keras_psplus.versions.__version__
    except Exception:  # An older one may fail in any way.
        pass
    return {
        "node": platform.node(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "versions": versions,
        "taken": {port: why for port in ports if (why := _listen(port, seconds))},
        "time": time.time(),
    }


def _listen(port: int, seconds: float) -> str | None:
    """Accepts connections from now on; returns why it cannot."""
    # As TensorFlow's servers do, where the host has both.
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)

    def accept() -> None:
        while True:
            try:
                connection = server.accept()[0]
            except OSError:
                return
            threading.Thread(target=_receive, args=(connection, seconds), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return None


def _receive(connection: socket.socket, seconds: float) -> None:
    """Takes what comes for a while, and answers with its bits per second."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_SECONDS)
        total = len(connection.recv(_PIECE))
        if not total:
            return
        seen = [(time.monotonic(), total)]
        end = seen[0][0] + seconds
        with contextlib.suppress(TimeoutError):
            while total < _MOST_BYTES and (left := end - time.monotonic()) > 0:
                connection.settimeout(left)
                if not (data := connection.recv(_PIECE)):
                    return
                total += len(data)
                seen.append((time.monotonic(), total))
        # The first half has the slow start of the connection, and what buffers take at once.
        began, before = max(
            (each for each in seen if 2 * each[1] <= total), default=(seen[0][0], 0)
        )
        took = time.monotonic() - began
        connection.sendall(f"{8 * (total - before) / took}\n".encode())
        connection.settimeout(_SECONDS)
        while connection.recv(_PIECE):
            pass


def name_of(address: tuple[str, int]) -> str:
    """An address as TF_CONFIG has it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reach(address: tuple[str, int], reasons: dict[str, str]) -> None:
    try:
        socket.create_connection(address, _SECONDS).close()
    except OSError as error:
        dropped = isinstance(error, TimeoutError) and "no answer (a firewall drops the packets)"
        reasons[name_of(address)] = dropped or error.strerror or str(error)


def _reach_all(addresses: list[tuple[str, int]]) -> dict[str, str]:
    """Reasons why addresses cannot be reached."""
    reasons: dict[str, str] = {}
    threads = [
        threading.Thread(target=_reach, args=(tuple(address), reasons)) for address in addresses
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return reasons


def _trip(address: tuple[str, int]) -> dict[str, float]:
    """Seconds of a round trip to an address: a connection's first packet and its answer."""
    trips = []
    with contextlib.suppress(OSError):
        peer = address[0], address[1]
        for _ in range(_TRIPS):
            began = time.monotonic()
            with socket.create_connection(peer, _SECONDS) as connection:
                trips.append(time.monotonic() - began)
                peer = connection.getpeername()[:2]  # The first has looked up its name.
    return {"latency": min(trips)} if trips else {}


def _send(address: tuple[str, int]) -> dict[str, float]:
    """Bits per second that an address takes: 0 if data do not pass."""
    piece, said = os.urandom(_PIECE), b""
    with contextlib.suppress(OSError, ValueError):
        with socket.create_connection((address[0], address[1]), _SECONDS) as connection:
            # Buffers that are full at the end are dropped.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.setblocking(False)
            while not said.endswith(b"\n"):
                readable, writable, _ = select.select([connection], [connection], [], _SECONDS)
                if readable:
                    said += connection.recv(64) or b"0\n"
                elif writable:
                    connection.send(piece)
                else:
                    break
        return {"bits_per_second": float(said or 0)}
    return {"bits_per_second": 0.0}


def main(ports: list[int], seconds: float) -> None:
    """Runs the program, which measures a link for some seconds at most."""
    print(json.dumps(_facts(ports, seconds)), flush=True)
    does: dict[str, Callable[[Any], object]]
    does = {"reach": _reach_all, "trip": _trip, "send": _send}
    for line in iter(sys.stdin.readline, ""):  # Until then, the others may still be trying.
        name, given = json.loads(line)
        print(json.dumps(does[name](given)), flush=True)
