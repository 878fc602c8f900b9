"""Tasks on other hosts, started by the user's own ssh.

On its host, `keras-psplus remote-task` starts the script, which ends with the connection. Its
standard input has the task's environment, the job's token among it, then signals and a sign of
life; at its end, or after a silence, the task is killed. Its standard output is the task's. Its
standard error is ssh's own, and has lines with `MARK` for what the task writes for the launcher.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from keras_psplus.cluster.config import split_address
from keras_psplus.cluster.environment import Task, has_port, python_path
from keras_psplus.cluster.launcher.task_ends import ending_with_parent
from keras_psplus.cluster.monitor.job import FOLDER_VARIABLE, JSON_LOG_VARIABLE
from keras_psplus.cluster.monitor.trace import TRACE_VARIABLE
from keras_psplus.cluster.preflight import is_local
from keras_psplus.files.replace import replace

COMMAND, MARK = "remote-task", "\x1ekeras-psplus "
# Folders, and a file, of this machine in which a task writes for the launcher.
FOLDERS = (FOLDER_VARIABLE, TRACE_VARIABLE)
MIRRORED = (*FOLDERS, JSON_LOG_VARIABLE)
BEAT_SECONDS, SILENCE_SECONDS = 5.0, 60.0
START_SECONDS = 30.0
_KILL_SECONDS = 5.0
_LOST_CONNECTION = 255  # ssh's own exit code
_MOST_SLOTS = 999
# Variables of this machine's environment that tasks of other hosts have as well.
_FORWARDED = ("KERAS_", "TF_", "XLA_", "NCCL_", "GRPC_", "PYTHON")
_SLOTS = re.compile(r"(?P<host>[^:]+|.*\]):(?P<slots>\d+)", re.ASCII)
_HOSTFILE_LINE = re.compile(r"(?P<host>\S+)(?:\s+slots\s*=\s*(?P<slots>\d+))?(?:\s+\S+=\S+)*")


def expand(hosts: Sequence[str]) -> list[str]:
    """The host of each task, from texts in which `A:2` has two.

    A number from 1000 on is the port of a single task.

    Example:

    >>> expand(["A:2", "B", "C:2300"])
    ['A', 'A', 'B', 'C:2300']

    Raises:
        ValueError: If one is no host.
    """
    found: list[str] = []
    for text in hosts:
        slots = _SLOTS.fullmatch(text)
        if slots is None or int(slots["slots"]) > _MOST_SLOTS:
            found.append(text)
        else:
            found += [slots["host"]] * int(slots["slots"])
    for host in found:
        address = host.rpartition("@")[2]
        try:
            split_address(address if has_port(address) else f"{address}:2222")
        except ValueError as error:
            raise ValueError(
                f"{host!r} cannot be used as a host: {error}. Received: {','.join(hosts)}"
            ) from None
    return found


def read_hostfile(path: str) -> list[str]:
    """Hosts of a file as OpenMPI's: a line for each, as in `A slots=2`."""
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file of hosts cannot be read: {error}. Received: {path}") from None
    hosts: list[str] = []
    for number, line in enumerate(lines, 1):
        line = line.partition("#")[0].strip()
        found = _HOSTFILE_LINE.fullmatch(line)
        if line and found is None:
            raise ValueError(
                "a file of hosts has a line for each, as in `A slots=2`. "
                f"Received: {line!r}, in line {number} of {path}"
            )
        if found is not None:
            hosts += [found["host"]] * int(found["slots"] or 1)
    return hosts


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of this machine that tasks of other hosts have as well."""
    return {name: value for name, value in environ.items() if name.startswith(_FORWARDED)}


class RemoteHosts:
    """Hosts of a cluster's tasks, and the way to them.

    Args:
        hosts: Host of each task that has an address, perhaps with a user before it
            (`me@A`) and a port behind.
        ssh: The command that reaches them, to which the host and a command are added. By default
            `ssh`, and for this machine's own addresses none.
        python: The hosts' Python; by default this one's path.
        start_seconds: How long a host may take to start a task.
        gpus_per_worker: As for `plan_tasks`, on each host.

    Attributes:
        addresses: Hosts without users, for `plan_tasks`.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        ssh: Sequence[str] | None = None,
        python: str | None = None,
        start_seconds: float = START_SECONDS,
        gpus_per_worker: int | None = None,
    ) -> None:
        self.addresses = [host.rpartition("@")[2] for host in hosts]
        self._users = [host.rpartition("@")[0] for host in hosts]
        self._ssh, self._python = ssh, python or sys.executable
        self._start_seconds, self._gpus_per_worker = start_seconds, gpus_per_worker
        self._places: list[dict[str, Any]] = []

    def place(self, tasks: Sequence[Task]) -> None:
        """Notes which host each task has: an evaluator, which has no address, the first one."""
        first = tasks[0].config.address or ""
        hosts = [split_address(task.config.address or first)[0] for task in tasks]
        users = [*self._users, *self._users[:1]]
        has_ps = any(task.config.task_type == "ps" for task in tasks)
        self._places = []
        seen: dict[str, collections.Counter[str]] = {}
        for task, host, user in zip(tasks, hosts, users, strict=False):
            jobs = seen.setdefault(host, collections.Counter())
            job = task.config.task_type
            self._places.append(
                {
                    "name": task.name,
                    "host": host,
                    "target": f"{user}@{host}" if user else host,
                    # Its share of the cores and GPUs of its host.
                    "counts": jobs,
                    "place": [job, jobs[job]],
                    "has_ps": has_ps,
                    "gpus_per_worker": self._gpus_per_worker,
                }
            )
            jobs[job] += 1

    def label(self, rank: int) -> str:
        """A task's name on the console, such as `worker-1@B`."""
        return f"{self._places[rank]['name']}@{self._places[rank]['host']}"

    def start(
        self,
        rank: int,
        argv: Sequence[str],
        environ: Mapping[str, str],
        own: Mapping[str, str],
        has_input: bool,
    ) -> RemoteProcess:
        """Starts a Python script as a task on its host.

        Args:
            rank: The task's number.
            argv: The script and its arguments.
            environ: The task's environment, beside that of its host.
            own: The environment of ssh.
            has_input: Whether the task reads standard input, until that is closed.
        """
        place, command = self._places[rank], self.command(rank, ["-m", "keras_psplus", COMMAND])
        is_here = command[0] == "sh"
        named = {} if is_here else {n: environ[n] for n in MIRRORED if n in environ}
        # A user's own file for a trace is none of the launcher's.
        mirrored = {n: path for n, path in named.items() if n not in FOLDERS or os.path.isdir(path)}
        request = {
            "argv": list(argv),
            "environ": dict(environ),
            "mirrored": list(mirrored),
            "has_input": has_input,
            **{name: place[name] for name in ("counts", "place", "has_ps", "gpus_per_worker")},
        }
        label = self.label(rank)
        return RemoteProcess(label, command, request, own, mirrored, self._start_seconds)

    def command(self, rank: int, words: Sequence[str]) -> list[str]:
        """The command that runs the Python of a task's host, with arguments, in this folder."""
        path = python_path()
        python = ["env", f"PYTHONPATH={path}", self._python] if path else [self._python]
        there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join([*python, *words])}"
        place = self._places[rank]
        if self._ssh is None and place["target"] == place["host"] and is_local(place["host"]):
            return ["sh", "-c", there]
        ssh = list(self._ssh or ["ssh"])
        # Of options, the first counts: the user's.
        options = ["BatchMode=yes", f"ConnectTimeout={max(1, round(self._start_seconds / 2))}"]
        # A shared connection would outlive its first user.
        options += ["ServerAliveInterval=15", "ServerAliveCountMax=3", "ControlPath=none"]
        ssh += [word for option in options for word in ("-o", option)]
        return [*ssh, place["target"], there]


class RemoteProcess:
    """A task on another host, as `subprocess.Popen` shows processes: its ssh, on this one.

    Attributes:
        stdin: Something to close, if the task reads its standard input.
        stdout: File of what the task and ssh say.
    """

    def __init__(
        self,
        label: str,
        command: Sequence[str],
        request: Mapping[str, Any],
        environ: Mapping[str, str],
        mirrored: Mapping[str, str],
        start_seconds: float,
    ) -> None:
        self._label, self._command, self._mirrored = label, command, mirrored
        self._start_seconds = start_seconds
        self._is_late = self._is_up = False
        self._ended: int | None = None  # the task's exit code
        own_output, output = os.pipe()
        self.stdout = os.fdopen(own_output, "rb")
        self._output = os.fdopen(output, "wb", buffering=0)
        self._process = subprocess.Popen(
            ending_with_parent(command),
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.PIPE,
            env=dict(environ),
            start_new_session=True,
            bufsize=0,
        )
        self.pid, self._lock = self._process.pid, threading.Lock()
        self._over = threading.Event()
        threads = [(self._read, f"messages of {label}"), (self._write, f"signs of life to {label}")]
        self._request = (json.dumps(request) + "\n").encode()
        self.stdin = _Input(self) if request["has_input"] else None
        for target, name in threads:
            threading.Thread(target=target, name=name, daemon=True).start()

    @property
    def returncode(self) -> int | None:
        return None if self._process.returncode is None else _code(self._process.returncode)

    def wait(self) -> int:
        return _code(self._process.wait())

    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal there, without reaping it; None while it runs."""
        if self.returncode is not None:
            return self.returncode
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None or self._ended is not None:
            return None if info is None else self._ended
        if info.si_code != os.CLD_EXITED:
            return _LOST_CONNECTION  # ssh itself was killed.
        return _code(info.si_status)

    def signal(self, number: int, to_children: bool) -> None:
        """Sends a signal to the task; SIGKILL ends ssh if the host does not answer."""
        if number != signal.SIGKILL:
            self.say(f"signal {int(number)} {int(to_children)}")
            return
        with self._lock, contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        if not self._is_up:
            self._kill()
        else:
            self._kill_later()

    def say(self, line: str) -> None:
        """Writes a line to the program there, which may have gone."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(f"{line}\n".encode())

    def _kill_later(self) -> None:
        def kill() -> None:
            if not self._over.wait(_KILL_SECONDS):
                self._kill()

        threading.Thread(target=kill, name=f"end of {self._label}", daemon=True).start()

    def _kill(self) -> None:
        # It is not reaped before its end is noted, so that the id is its own.
        if not self._over.is_set():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(self._request)
            # A connection that hangs must not stop who sends a signal.
            os.set_blocking(self._process.stdin.fileno(), False)
        if not self._over.wait(self._start_seconds) and not self._is_up:
            self._tell(
                f"{self._label} was not started within {self._start_seconds:g} s: its host, or the "
                f"Python there, does not answer. Try `{self._try()}`. "
                f"Received: --start_timeout={self._start_seconds:g}"
            )
            self._is_late = True
            self._kill()
        while not self._over.wait(BEAT_SECONDS):
            self.say("")

    def _read(self) -> None:
        """Takes what comes on ssh's standard error, until that ends."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.decode(errors="replace")
            if text.startswith(MARK):
                try:
                    self._take(json.loads(text.removeprefix(MARK)))
                except (OSError, ValueError, KeyError, TypeError) as error:
                    self._tell(f"lost some of what {self._label} says of itself: {error}")
            else:
                with contextlib.suppress(OSError, ValueError):
                    self._output.write(line)
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._over.set()
        assert info is not None
        code = info.si_status
        if self._is_late:
            pass  # It has been said.
        elif not self._is_up:
            self._tell(
                f"{self._label} was not started: its command has ended with "
                f"{'exit code' if info.si_code == os.CLD_EXITED else 'signal'} {code}. "
                f"Try `{self._try()}`. Received: {shlex.join(self._command[:-1])}"
            )
        elif self._ended is None:
            self._tell(f"the connection to {self._label} was lost, and the task there ends")
        self._output.close()
        self._process.stderr.close()
        with self._lock, contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _take(self, said: dict[str, Any]) -> None:
        self._is_up = True
        if "ended" in said:
            self._ended = int(said["ended"])
            # Processes that it has left may hold its output, for whose end ssh waits.
            self._kill_later()
        if "file" not in said:
            return
        target = pathlib.Path(self._mirrored[said["of"]])
        if said["of"] == JSON_LOG_VARIABLE:
            with open(target, "ab", buffering=0) as file:
                file.write(said["text"].encode())
            return
        path = target / pathlib.PurePath(said["file"]).name
        replace(path, said["text"].encode(), is_durable=False)

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._output.write(f"keras-psplus: {text}\n".encode())

    def _try(self) -> str:
        """A command by which a user sees whether the host's Python has the library."""
        *reach, there = self._command
        python = there.rpartition(f" -m keras_psplus {COMMAND}")[0]
        return shlex.join([*reach, f"{python} -m keras_psplus --version"])


class _Input:
    """Standard input of a task on another host, which can be closed."""

    def __init__(self, process: RemoteProcess) -> None:
        self._process, self._is_closed = process, False

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._process.say("close")


def _code(code: int) -> int:
    """A task's exit code, from ssh's: negative for a signal there."""
    if code < 0:
        return _LOST_CONNECTION
    return 128 - code if 128 < code <= 128 + 64 else code


def read_line(file: IO[bytes]) -> dict[str, Any]:
    """The first line of a task's standard input, of which no more is read."""
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(file.fileno(), 1)):
        line += byte
    request: dict[str, Any] = json.loads(line)
    return request
