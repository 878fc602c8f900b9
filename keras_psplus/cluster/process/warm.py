"""Processes that start warm: forks of one that has imported TensorFlow and Keras before.

Importing both takes some seconds of a processor, at every start of every task. A `WarmPython` is an
idle process that has imported them; nothing of TensorFlow's runtime has begun there. The kernel
hands its forks over to the caller, to whom they are children like others: processes with an
id, a group, an environment, pipes and an exit code of their own.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, Self

_PR_SET_CHILD_SUBREAPER = 36
_SERVER = str(pathlib.Path(__file__).with_name("warm_server.py"))
MODULES = ("tensorflow", "keras")


class WarmStartError(RuntimeError):
    """The modules could not be imported, so that no script can start as a fork."""


class WarmPython:
    """A process that has imported some modules, and forks itself to run scripts.

    It ends with this object, or with this process. Linux only.

    Example:

    ```python
    with WarmPython() as warm:
        process = warm.start([script, "--epochs", "3"], os.environ)
        process.wait()
    ```

    Args:
        modules: Names of the modules. They are imported when the first script is to run.
        environ: The environment in which they are imported; by default that script's, without
            TF_CONFIG. What libraries read there when they are imported goes for all scripts.
    """

    def __init__(
        self, modules: Sequence[str] = MODULES, environ: Mapping[str, str] | None = None
    ) -> None:
        self._modules = list(modules)
        self._environ = None if environ is None else dict(environ)
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process; its forks go on."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            assert self._connection is not None and self._output is not None
            self._connection.close()
            self._process.wait()
            self._output.close()
        self._connection = self._process = self._output = None

    def start(
        self, argv: Sequence[str], environ: Mapping[str, str], has_input: bool = False
    ) -> WarmProcess:
        """Runs a script that ends with this process, as the leader of its own session."""
        their_input, own_input = os.pipe() if has_input else (os.open(os.devnull, os.O_RDONLY), -1)
        own_output, their_output = os.pipe()
        try:
            pid = self.fork(argv, environ, [their_input, their_output, their_output])
        except BaseException:
            os.close(own_output)
            if has_input:
                os.close(own_input)
            raise
        finally:
            os.close(their_input)
            os.close(their_output)
        return WarmProcess(
            pid,
            os.fdopen(own_input, "wb", buffering=0) if has_input else None,
            os.fdopen(own_output, "rb"),
        )

    def fork(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        files: Sequence[int],
        is_leader: bool = True,
        ends_with_parent: bool = True,
        folder: str | None = None,
    ) -> int:
        """Runs a script in a forked child process; returns its process id."""
        request = {
            "argv": list(argv),
            "environ": dict(environ),
            "folder": folder or os.getcwd(),
            "is_leader": is_leader,
            "ends_with_parent": ends_with_parent,
            "parent": os.getpid(),
        }
        text = json.dumps(request).encode()
        with self._lock:
            if self._environ is None:
                self._environ = {k: v for k, v in environ.items() if k != "TF_CONFIG"}
            if self._process is not None and self._process.poll() is not None:
                self._end()  # It has been killed.
            if self._process is None:
                self._begin()
            pid = self._ask(text, files)
            if pid is None:
                assert self._output is not None
                self._output.seek(0)
                said = self._output.read().decode(errors="replace")
                raise WarmStartError(
                    f"The process that imports {' and '.join(self._modules)} for the tasks has "
                    f"ended. Received: {said or 'no output'}"
                )
        return pid

    def _ask(self, text: bytes, files: Iterable[int]) -> int | None:
        assert self._connection is not None
        prctl = ctypes.CDLL(None).prctl
        # An orphan goes to the next of its ancestors that asks for it.
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(self._connection, [len(text).to_bytes(8, "big")], list(files))
            self._connection.sendall(text)
            answer = self._connection.recv(8, socket.MSG_WAITALL)
        except OSError:
            answer = b""
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0)
        return int.from_bytes(answer, "big") if len(answer) == 8 else None

    def _begin(self) -> None:
        self._connection, theirs = socket.socketpair()
        # TensorFlow says something when it is imported; it is shown if it cannot be.
        self._output = tempfile.TemporaryFile()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, _SERVER, str(theirs.fileno()), *self._modules],
                env=self._environ,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,  # Ctrl-C is for the tasks.
            )


class WarmProcess:
    """A fork of a `WarmPython`, as `subprocess.Popen` shows processes."""

    def __init__(self, pid: int, stdin: IO[bytes] | None, stdout: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None

    def wait(self, timeout: Any = None) -> int:
        """Waits for its end; returns its exit code, negative for a signal."""
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode
