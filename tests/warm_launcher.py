"""Runs `python -m MODULE ARG...` in a fork of `warm.py`, whose tasks are forks as well.

warm_launcher.py MODULE ARG...

The fork first makes another one of itself, which forks the tasks. These are children of the
launcher, as ever; but all of them order sets of strings alike.
"""

import importlib.util
import os
import pathlib
import runpy
import socket
import subprocess
import sys

_SERVER = pathlib.Path(__file__).parents[1] / "keras_psplus/cluster/process/warm_server.py"


def server():
    """The module that forks, without the package, which a task imports itself."""
    spec = importlib.util.spec_from_file_location("warm_server", _SERVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Fork:
    """A child process, as `WarmPython` asks for its server."""

    def __init__(self, pid):
        self._pid = pid

    def poll(self):
        return None

    def wait(self):
        os.waitpid(self._pid, 0)


own, theirs = socket.socketpair()
pid = os.fork()
if not pid:
    own.close()
    # Ctrl-C is for the tasks, and who reads what the launcher says waits for its end.
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    del sys.path[0]  # This file's folder; a script's own comes there.
    module = server()
    ending = module.Ending()
    module.become(*module.serve(theirs), {})
    module.run(ending)
    sys.exit()
theirs.close()
sys.path[0] = os.getcwd()

from keras_psplus.cluster.process.warm import WarmPython  # noqa: E402
from tests import warm  # noqa: E402


class Forked(WarmPython):
    """A `WarmPython` whose server there is already."""

    def _begin(self):
        self._connection, self._process, self._output = own, Fork(pid), open(os.devnull)


warm.use([Forked()])
subprocess.Popen = warm.Popen
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
