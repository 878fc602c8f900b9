"""Program that says what a host has, for `keras-psplus doctor --hosts`.

It is sent to the host's Python as text, so that it needs nothing there but that. It writes a line
of JSON with what there is, listens on ports, reads a line with the others' addresses, and writes a
line with those that it cannot reach.
"""

import importlib.metadata
import json
import os
import platform
import socket
import sys
import threading
import time

PACKAGES = "tensorflow keras numpy keras-psplus"
_SECONDS = 3.0


def _facts(ports: list[int]) -> dict[str, object]:
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
        "taken": {port: why for port in ports if (why := _listen(port))},
        "time": time.time(),
    }


def _listen(port: int) -> str | None:
    """Accepts connections from now on; returns why it cannot."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("", port))
        server.listen()
    except OSError as error:
        return error.strerror or str(error)

    def accept() -> None:
        while True:
            try:
                server.accept()[0].close()
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    return None


def _reach(address: tuple[str, int], reasons: dict[str, str]) -> None:
    try:
        socket.create_connection(address, _SECONDS).close()
    except OSError as error:
        reasons[f"{address[0]}:{address[1]}"] = error.strerror or str(error)


def main(ports: list[int]) -> None:
    """Runs the program."""
    print(json.dumps(_facts(ports)), flush=True)
    line = sys.stdin.readline()
    reasons: dict[str, str] = {}
    threads = [
        threading.Thread(target=_reach, args=(tuple(address), reasons))
        for address in json.loads(line or "[]")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(reasons), flush=True)
    sys.stdin.read()  # The others may still be trying.
