"""Starts Python scripts as forks of processes that have imported TensorFlow and Keras before.

Importing both takes four seconds of a processor, and the suite starts some three hundred scripts:
two fifths of its time. `Popen` is `subprocess.Popen`, but a script is run by a fork of a *zygote*,
an idle process that has imported what `quick_start.py` does; nothing of TensorFlow's runtime has
begun there. The kernel hands the fork over to the caller, to whom it is a child like
others: a process with an id, a group, an environment, pipes and an exit code of its own.

Two zygotes take turns, so that the tasks of a cluster still differ in how Python orders sets of
strings. What a new interpreter would do differently is started in a new interpreter.
"""

import contextlib
import ctypes
import inspect
import itertools
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ZYGOTES = 2
_ROOT = str(pathlib.Path(__file__).resolve().parents[1])
_WRAPPER = "exec_with_parent.py"
# Read at the start of Python or TensorFlow; a zygote has the caller's, but for the log level.
_AT_THE_START = ("KERAS_BACKEND", "LD_PRELOAD", "PYTHONHASHSEED")
_LOG_LEVEL = ("TF_CPP_MIN_LOG_LEVEL", "2")
_ordinary_popen = subprocess.Popen


class Popen(subprocess.Popen):
    """As `subprocess.Popen`, which runs scripts in forks of a zygote where it can."""

    def _execute_child(self, *args, **kwargs):
        start = super()._execute_child
        given = inspect.signature(start).bind(*args, **kwargs).arguments
        environ = dict(os.environ if given["env"] is None else given["env"])
        script, ends_with_parent = _script(given["args"])
        if script is None or not _starts_alike(given, environ):
            start(*args, **kwargs)
            return
        files = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        request = {
            "argv": script,
            "environ": {os.fsdecode(k): os.fsdecode(v) for k, v in environ.items()},
            "folder": os.fspath(given["cwd"] or os.getcwd()),
            "is_leader": given["start_new_session"],
            "ends_with_parent": ends_with_parent,
            "parent": os.getpid(),
        }
        self.pid = _fork(request, [own if file == -1 else file for own, file in enumerate(files)])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))


def _script(args):
    """The script with its arguments, or None, and whether it ends with its parent."""
    args = [os.fsdecode(arg) for arg in args] if isinstance(args, (list, tuple)) else []
    ends_with_parent = len(args) > 4 and args[3].endswith(_WRAPPER)
    if ends_with_parent:
        args = args[5:]
    is_script = len(args) > 1 and args[0] == sys.executable and args[1].endswith(".py")
    return (args[1:] if is_script else None), ends_with_parent


def _starts_alike(given, environ):
    return (
        not any(given[name] for name in ("preexec_fn", "pass_fds", "shell", "executable"))
        and environ.get(_LOG_LEVEL[0], _LOG_LEVEL[1]) == _LOG_LEVEL[1]
        and all(environ.get(name) == os.environ.get(name) for name in _AT_THE_START)
    )


_lock = threading.Lock()
_zygotes = []
_turns = itertools.cycle(range(_ZYGOTES))


def _fork(request, files):
    """Has the next zygote run a script; returns the id of the new process."""
    prctl = ctypes.CDLL(None).prctl
    text = json.dumps(request).encode()
    with _lock:
        if not _zygotes:
            _zygotes.extend(_start_zygote() for _ in range(_ZYGOTES))
        zygote, _, said = _zygotes[next(_turns)]
        # An orphan goes to the next of its ancestors that asks for it.
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(zygote, [len(text).to_bytes(8, "big")], files)
            zygote.sendall(text)
            answer = zygote.recv(8, socket.MSG_WAITALL)
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0)
    if len(answer) < 8:
        said.seek(0)
        raise RuntimeError(f"A zygote of the tests has ended:\n{said.read().decode()}")
    return int.from_bytes(answer, "big")


def _start_zygote():
    ours, theirs = socket.socketpair()
    environ = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    environ |= dict([_LOG_LEVEL]) | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": _ROOT}
    # TensorFlow says something at its import, and perhaps after pytest's last line.
    said = tempfile.TemporaryFile()
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        process = _ordinary_popen(
            command,
            env=environ,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
    # It ends when this end is closed.
    return ours, process, said


def _serve(connection):
    """Forks for each request, and returns the request in the fork; ends with the caller."""
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


def _become(request, files):
    """Makes this process what `Popen` was asked for, but for the script."""
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
    os.environ.update(request["environ"])
    sys.argv[:] = request["argv"]
    _as_new(request["environ"].get("PYTHONPATH", ""))


def _as_new(python_path):
    """Undoes what of Python's own state is the zygote's."""
    import numpy as np

    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    sys.path[1:1] = [path for path in python_path.split(os.pathsep) if path not in sys.path]
    random.seed()
    np.random.seed()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)


def _run():
    path = sys.argv[0]
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    module.__file__ = path
    exec(compile(pathlib.Path(path).read_bytes(), path, "exec"), module.__dict__)


if __name__ == "__main__":
    from tests import quick_start  # noqa: F401

    with contextlib.suppress(KeyboardInterrupt):
        _become(*_serve(socket.socket(fileno=int(sys.argv[1]))))
    _run()
