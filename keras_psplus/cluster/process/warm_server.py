"""Forks itself for each script that it is asked to run: `warm_server.py SOCKET MODULE...`.

It imports the modules once, and each fork runs a script as a new interpreter would: with the
arguments, environment, folder, session and files of the request. See `warm.py`.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Iterator
from typing import Any

_PR_SET_PDEATHSIG = 1
# Name of a module by which a process knows that it has started so, and in which environment.
WARM_START = "keras_psplus_warm_start"
_FILE = io.IOBase.__mro__[1]


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Forks for each request and returns it in the fork; ends when the connection does."""
    while True:
        size, files, _, _ = socket.recv_fds(connection, 8, 3)
        if not size:
            os._exit(0)
        request = json.loads(connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
        reading, writing = os.pipe()
        mediator = os.fork()
        if not mediator:
            request["mediator"] = os.getpid()
            pid = os.fork()
            if not pid:
                os.close(reading)
                os.close(writing)
                connection.close()
                return request, files
            os.write(writing, pid.to_bytes(8, "big"))
            os._exit(0)
        # Its child is an orphan when it has ended, and then the caller's.
        os.waitpid(mediator, 0)
        for file in (writing, *files):
            os.close(file)
        connection.sendall(os.read(reading, 8))
        os.close(reading)


def become(request: dict[str, Any], files: list[int], set_by_modules: dict[str, str]) -> None:
    """Makes this process what was asked for, but for the script.

    Args:
        files: Its standard input, output and error.
        set_by_modules: What the modules have put into the environment when they were imported.
    """
    while os.getppid() == request["mediator"]:
        time.sleep(0.001)
    if request["ends_with_parent"]:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        # It may have ended before, and nothing says so then.
        if os.getppid() != request["parent"]:
            os._exit(1)
    if request["is_leader"]:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update({**set_by_modules, **request["environ"]})
    time.tzset()
    tempfile.tempdir = None  # One found by a module goes by the server's environment.
    sys.modules[WARM_START] = start = types.ModuleType(WARM_START)
    start.environ = dict(os.environ)  # type: ignore[attr-defined]
    sys.argv[:] = request["argv"]
    sys.orig_argv[:] = [sys.executable, *request["argv"]]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    path = request["environ"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [each for each in path if each and each not in sys.path]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def flush_files() -> None:
    """Flushes the open files of Python's that its garbage collector knows of."""
    for each in gc.get_objects():
        if issubclass(type(each), _FILE):
            with contextlib.suppress(Exception):  # Closed, read-only, or its reader has gone.
                each.flush()


class Ending:
    """Exit of a fork as of Python, except that objects from before stay allocated.

    Python destroys all objects at exit, and the memory that a fork shares would be copied for it: a
    fifth of a second of a processor. Threads are joined and functions of `atexit` run as ever. Open
    files are flushed; `__del__` of remaining objects does not run.
    """

    def __init__(self) -> None:
        self._code: int | None = None
        # The first to be registered is the last to run.
        atexit.register(self._end)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes how the script ends."""
        try:
            yield
        except SystemExit as error:
            is_code = error.code is None or isinstance(error.code, int)
            self._code = int(error.code or 0) if is_code else 1
            raise
        except Exception:
            self._code = 1
            raise
        else:
            self._code = 0

    def _end(self) -> None:
        if self._code is None:
            return  # By Ctrl-C, of which Python itself makes a signal; or it is the server.
        # Files open before the fork are not among these.
        flush_files()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        ctypes.CDLL(None).fflush(None)
        os._exit(self._code)


def run(ending: Ending) -> None:
    """Runs the script as `__main__`."""
    path = sys.argv[0]
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __cached__=None, __builtins__=__builtins__)
    # A script that asks for another one than Python's finds none.
    sys.excepthook = sys.__excepthook__ = _show
    with open(path, "rb") as file:
        source = file.read()
    with ending.noted():
        exec(compile(source, path, "exec"), module.__dict__)


def _show(kind: type, error: BaseException, trace: types.TracebackType | None) -> None:
    """Shows an exception without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


def main() -> Ending:
    """Imports the modules, serves, and returns in a fork."""
    ending = Ending()
    del sys.path[0]  # This file's folder; a script's own comes there.
    # It would walk through all that is imported, again and again.
    gc.disable()
    before = dict(os.environ)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    set_by_modules = {k: v for k, v in os.environ.items() if before.get(k) != v}
    connection = socket.socket(fileno=int(sys.argv[1]))
    with warnings.catch_warnings():
        # Threads of libraries, which have nothing to do yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        request, files = serve(connection)
    become(request, files, set_by_modules)
    return ending


if __name__ == "__main__":
    run(main())
