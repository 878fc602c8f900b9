"""Processes of a cluster's tasks, with their output and their logs."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from keras_psplus.cluster.console import Console, LogFile, OutputPump, warn
from keras_psplus.cluster.launcher.task_ends import exit_code_of
from keras_psplus.cluster.process.left_processes import LeftProcesses
from keras_psplus.cluster.process.warm import WarmProcess, WarmPython

_WRAPPER = str(pathlib.Path(__file__).parents[1] / "process" / "exec_with_parent.py")


class TaskProcesses:
    """Processes of tasks, each in a group of its own, until they are reaped.

    Args:
        console: A `Console` that shows what tasks say, or None.
        network: Network namespaces of the tasks, or None.
        warm: A `WarmPython` whose forks run a Python script, or None.

    Attributes:
        log_starts: Dict from task name to the bytes that its log had before.
        is_released: Whether all have ended, and their ids may be those of other processes.
    """

    def __init__(
        self,
        argv: Sequence[str],
        log_dir: pathlib.Path,
        console: Console | None,
        network: Any,
        warm: WarmPython | None,
    ) -> None:
        self._argv, self._log_dir, self._console = list(argv), log_dir, console
        self._network, self._warm = network, warm
        self._processes: dict[str, subprocess.Popen[bytes] | WarmProcess] = {}
        self._logs: dict[str, LogFile] = {}
        self._pumps: list[OutputPump] = []
        # Of tasks that were started again.
        self._replaced: list[tuple[subprocess.Popen[bytes] | WarmProcess, LogFile]] = []
        self._left = LeftProcesses()
        self.log_starts: dict[str, int] = {}
        self.is_released = False
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[str]:
        return iter(self._processes)

    def __contains__(self, name: str) -> bool:
        return name in self._processes

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    @property
    def unwritten(self) -> dict[str, str]:
        """Dict from task name to the output that could not be written to its log."""
        return {name: log.lost for name, log in self._logs.items() if log.lost}

    def log_path(self, name: str) -> pathlib.Path:
        return self._log_dir / f"{name}.log"

    def start(
        self, rank: int, name: str, environ: Mapping[str, str], start: int, has_input: bool
    ) -> int:
        """Starts a task, also once more.

        Args:
            rank: Its number in the cluster.
            start: How often the job, or the task, was started before.
            has_input: Whether it reads standard input, until `close_input`.

        Returns:
            Its process id.
        """
        with self._lock if name in self._processes else contextlib.nullcontext():
            if name in self._processes:
                # Its id may be another process's from here on.
                self._left.forget(self._processes[name].pid)
                self._processes[name].wait()
                self._replaced.append((self._processes[name], self._logs[name]))
            on_warning = warn if self._console is None else self._console.warn
            heading = f"keras-psplus: restart {start}\n" if start else ""
            log = LogFile(self.log_path(name), bool(start), on_warning, heading)
            self._logs[name] = log
            self.log_starts.setdefault(name, log.size)
            process = self._process(rank, {**environ, **self._left.environment}, has_input)
            self._processes[name] = process
            self._left.add(process.pid)
        assert process.stdout is not None
        pump = OutputPump(name, process.stdout, log, self._console)
        self._pumps.append(pump)
        pump.start()
        return process.pid

    def _process(
        self, rank: int, environ: dict[str, str], has_input: bool
    ) -> subprocess.Popen[bytes] | WarmProcess:
        if self._warm is not None and self._network is None:
            return self._warm.start(self._argv[1:], environ, has_input=has_input)
        command = self._argv
        if self._network is not None:
            command = [*self._network.inside(rank), *command]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", _WRAPPER, str(os.getpid()), *command]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,  # its own group: signals reach what it starts as well
        )

    def close_input(self, name: str) -> None:
        stdin = self._processes[name].stdin
        assert stdin is not None
        stdin.close()

    def exit_code(self, name: str) -> int | None:
        """A task's exit code, without reaping it; None while it runs."""
        return exit_code_of(self._processes[name])  # type: ignore[arg-type]

    def signal(self, names: Iterable[str], number: int, to_children: bool = True) -> None:
        """Sends a signal to tasks, unless all have ended.

        Args:
            to_children: Whether to what they have started as well.
        """
        send = os.killpg if to_children else os.kill
        with self._lock:
            for name in [] if self.is_released else names:
                # They are not reaped before `release`, so that the ids are still theirs.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    send(self._processes[name].pid, number)

    def kill(self) -> None:
        """Kills all, and what those have started that have ended."""
        self.signal(self._processes, signal.SIGKILL)

    def release(self, may_leave: bool) -> None:
        """Reaps all, once they have ended.

        Args:
            may_leave: Whether what they have started in sessions of its own may go on.
        """
        self._left.end(may_leave)
        with self._lock:
            self.is_released = True  # from here on, a process id may be another process's
        for process in self._processes.values():
            process.wait()
        for pump in self._pumps:
            pump.join(5.0)
        for process in [*self._processes.values(), *(process for process, _ in self._replaced)]:
            assert process.stdout is not None
            process.stdout.close()
            if process.stdin is not None:
                process.stdin.close()
        for log in [*self._logs.values(), *(log for _, log in self._replaced)]:
            log.close()
        self._pumps = []
