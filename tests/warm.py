"""Starts Python scripts as forks of processes that have imported TensorFlow and Keras before.

Importing both takes four seconds of a processor, and the suite starts some three hundred scripts:
two fifths of its time. `Popen` is `subprocess.Popen`, but a script is run by a fork of a
`keras_psplus.cluster.process.warm.WarmPython` that has imported what `quick_start.py` does.

Two of these take turns, so that the tasks of a cluster still differ in how Python orders sets of
strings. The command `python -m keras_psplus run` is such a fork too, as is that of `tests/lab`, and
so are its tasks: see `warm_launcher.py`. What a new interpreter would do differently is started in
a new interpreter.
"""

import atexit
import inspect
import itertools
import os
import pathlib
import subprocess
import sys
import threading

_PROCESSES = 2
_ROOT = str(pathlib.Path(__file__).resolve().parents[1])
_WRAPPER = "exec_with_parent.py"
_LAUNCHERS = ("-m", "keras_psplus", "run"), ("-m", "tests.lab.run")
# Read at the start of Python or TensorFlow; all have the caller's, but for the log level.
_AT_THE_START = ("KERAS_BACKEND", "LD_PRELOAD", "PYTHONHASHSEED")
_LOG_LEVEL = ("TF_CPP_MIN_LOG_LEVEL", "2")


class Popen(subprocess.Popen):
    """As `subprocess.Popen`, which runs scripts in forks where it can."""

    def _execute_child(self, *args, **kwargs):
        start = super()._execute_child
        given = inspect.signature(start).bind(*args, **kwargs).arguments
        environ = dict(os.environ if given["env"] is None else given["env"])
        script, ends_with_parent = _script(given["args"])
        if script is None or not _starts_alike(given, environ):
            start(*args, **kwargs)
            return
        files = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        self.pid = _next().fork(
            script,
            {os.fsdecode(k): os.fsdecode(v) for k, v in environ.items()},
            [own if file == -1 else file for own, file in enumerate(files)],
            is_leader=given["start_new_session"],
            ends_with_parent=ends_with_parent,
            folder=os.fspath(given["cwd"] or os.getcwd()),
        )
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))


def _script(args):
    """The script with its arguments, or None, and whether it ends with its parent."""
    args = [os.fsdecode(arg) for arg in args] if isinstance(args, (list, tuple)) else []
    ends_with_parent = len(args) > 4 and args[3].endswith(_WRAPPER)
    if ends_with_parent:
        args = args[5:]
    launches = any(tuple(args[1 : 1 + len(words)]) == words for words in _LAUNCHERS)
    if args[:1] == [sys.executable] and launches:
        args[1:2] = [os.path.join(_ROOT, "tests", "warm_launcher.py")]
    is_script = len(args) > 1 and args[0] == sys.executable and args[1].endswith(".py")
    return (args[1:] if is_script else None), ends_with_parent


def _starts_alike(given, environ):
    return (
        not any(given[name] for name in ("preexec_fn", "pass_fds", "shell", "executable"))
        and environ.get(_LOG_LEVEL[0], _LOG_LEVEL[1]) == _LOG_LEVEL[1]
        and all(environ.get(name) == os.environ.get(name) for name in _AT_THE_START)
    )


_lock = threading.Lock()
_processes = []
_turns = itertools.count()


def use(processes):
    """Has scripts run in forks of these `WarmPython`s."""
    for process in processes:
        _processes.append(process)
        atexit.register(process.close)


def _next():
    from keras_psplus.cluster.process.warm import WarmPython

    with _lock:
        if not _processes:
            environ = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
            environ |= dict([_LOG_LEVEL]) | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": _ROOT}
            modules = ["tests.quick_start", "tests.quick_import"]
            use([WarmPython(modules, environ) for _ in range(_PROCESSES)])
        return _processes[next(_turns) % len(_processes)]
