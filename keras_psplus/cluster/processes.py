"""A cluster of local processes: started, watched, and ended as one."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias

from keras_psplus.cluster.config import EVALUATOR
from keras_psplus.cluster.console import Console, LogFile, OutputPump, warn
from keras_psplus.cluster.environment import (
    RESTART_VARIABLE,
    TOKEN_VARIABLE,
    TRAINING_END_VARIABLE,
    Task,
    plan_tasks,
)
from keras_psplus.cluster.launcher.remote import RemoteHosts, RemoteProcess, forwarded
from keras_psplus.cluster.launcher.task_ends import (
    EVALUATOR_NAME,
    SHORT_SECONDS,
    WRONG_COMMAND_LINE,
    ClusterResult,
    EndingSignals,
    GracePeriods,
    KernelKills,
    TaskEnds,
    TaskRestarts,
    WorkerRange,
    describe,
    ending_with_parent,
    exit_code_of,
    pause_after,
)
from keras_psplus.cluster.monitor.job import JobRecord
from keras_psplus.cluster.process.left_processes import LeftProcesses
from keras_psplus.cluster.process.signals import GRACE_VARIABLE
from keras_psplus.cluster.process.warm import WarmProcess, WarmPython

# Processes of a cluster's tasks, with their output and their logs.

_Process: TypeAlias = subprocess.Popen[bytes] | WarmProcess | RemoteProcess


class TaskProcesses:
    """Processes of tasks, each in a group of its own, until they are reaped.

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
        remote: RemoteHosts | None = None,
    ) -> None:
        self._argv, self._log_dir, self._console = list(argv), log_dir, console
        self._network, self._warm, self._remote = network, warm, remote
        self._processes: dict[str, _Process] = {}
        self._logs: dict[str, LogFile] = {}
        self._pumps: list[OutputPump] = []
        # Of tasks that were started again.
        self._replaced: list[tuple[_Process, LogFile]] = []
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
        """Starts a task, also once more."""
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
        label = name if self._remote is None else self._remote.label(rank)
        pump = OutputPump(label, process.stdout, log, self._console)
        self._pumps.append(pump)
        pump.start()
        return process.pid

    def _process(self, rank: int, environ: dict[str, str], has_input: bool) -> _Process:
        if self._remote is not None:
            own = {**os.environ, **self._left.environment}
            return self._remote.start(rank, self._argv[1:], environ, own, has_input)
        if self._warm is not None and self._network is None:
            return self._warm.start(self._argv[1:], environ, has_input=has_input)
        command = self._argv
        if self._network is not None:
            command = [*self._network.inside(rank), *command]
        return subprocess.Popen(
            ending_with_parent(command),
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
        process = self._processes[name]
        if isinstance(process, RemoteProcess):
            return process.exit_code()
        return exit_code_of(process)  # type: ignore[arg-type]

    def signal(self, names: Iterable[str], number: int, to_children: bool = True) -> None:
        """Sends a signal to tasks, unless all have ended."""
        send = os.killpg if to_children else os.kill
        with self._lock:
            for name in [] if self.is_released else names:
                # They are not reaped before `release`, so that the ids are still theirs.
                process = self._processes[name]
                if isinstance(process, RemoteProcess):
                    process.signal(number, to_children)
                    continue
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    send(process.pid, number)

    def kill(self) -> None:
        """Kills all, and what those have started that have ended."""
        self.signal(self._processes, signal.SIGKILL)

    def release(self, may_leave: bool) -> None:
        """Reaps all, once they have ended."""
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


# A cluster of local processes: started, watched, and ended as one.

_POLL = 0.05


class LocalCluster:
    """Starts one command in several local processes, each a task of one cluster.

    A failing task ends the cluster: the others have `failure_grace` seconds to
    report what they saw, then they are terminated. When the tasks that compute
    have ended well, parameter servers have `server_grace` seconds to end too.
    In the main thread, SIGINT, SIGTERM and SIGHUP end the cluster. The
    processes end with the thread that called `start`.

    Example:

    ```python
    with LocalCluster([sys.executable, "train.py"], workers=2) as cluster:
        result = cluster.wait(timeout=600)
    sys.exit(result.exit_code)
    ```

    Args:
        argv: The command, a list of strings.
        workers: Number of workers.
        ps: Number of parameter servers.
        chief: Whether there is a chief beside the workers.
        env: Dict of environment variables that the tasks get beside this
            process's own.
        log_dir: Folder for one log file per task; a temporary one by default.
        console: A `Console` for the tasks' output; `None` keeps it to the log
            files.
        failure_grace: Seconds that the others have after a task has failed.
        server_grace: Seconds that parameter servers have after the end of the
            training.
        worker_grace: The same for workers that serve a chief (clusters with a
            chief and parameter servers), which may have work left.
        kill_grace: Seconds from SIGTERM to SIGKILL.
        grace: Seconds in which the tasks that train may save the job after SIGTERM, at the end of a
            step; 0 for none.
        error_grace: As `failure_grace`, which is the default, if that task was
            not killed by a signal: it has said itself what was wrong.
        idle_grace: The same for tasks that only serve others, from the end of
            these others.
        restart: How often the job was started before. Logs go on then, and the
            tasks find the number in `KERAS_PSPLUS_RESTART`.
        task_restarts: How often workers that serve a chief and have failed are
            started again by themselves, while the others go on.
        server_restarts: Whether that goes for parameter servers of a cluster without a chief, too:
            whether the others go on without one depends on the strategy.
        record: A `JobRecord` that hears of the tasks' starts and ends, or None.
        evaluator: Whether an evaluator runs beside the cluster. Its failure is none of the job's.
        evaluator_grace: Seconds that it has after the end of the training.
        network: An emulated network with a host for each task, a context that begins and ends with
            the cluster; None for this machine's own. Its `addresses` are those of the hosts, what
            `inside(rank)` returns goes before a command, and `environment` changes variables.
        warm: A `WarmPython` whose forks run a Python script; None starts the command.
        gpus_per_worker: As for `plan_tasks`.
        min_workers: How many of the workers are started, if others are to join and leave.
        remote: `RemoteHosts` of the tasks, whose Python runs the script; None for this machine.
    """

    def __init__(
        self,
        argv: Sequence[str | os.PathLike[str]],
        workers: int = 2,
        ps: int = 0,
        chief: bool = False,
        env: Mapping[str, str] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        console: Console | None = None,
        failure_grace: float = 5.0,
        server_grace: float = 10.0,
        worker_grace: float = 60.0,
        kill_grace: float = 3.0,
        grace: float = 0.0,
        error_grace: float | None = None,
        idle_grace: float | None = None,
        restart: int = 0,
        task_restarts: int = 0,
        server_restarts: bool = False,
        network: Any = None,
        record: JobRecord | None = None,
        evaluator: bool = False,
        evaluator_grace: float = 600.0,
        warm: WarmPython | None = None,
        gpus_per_worker: int | None = None,
        min_workers: int | None = None,
        remote: RemoteHosts | None = None,
    ) -> None:
        self._argv = [os.fspath(arg) for arg in argv]
        self._environ = {**os.environ, **(env or {})}
        if remote is not None:
            self._environ = {**forwarded(os.environ), **(env or {})}
        # Tasks of other jobs on this machine are none of this one's.
        self._environ[TOKEN_VARIABLE] = self._environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)
        self._environ[RESTART_VARIABLE] = str(restart)
        self.network, self._record, self._remote = network, record, remote
        hosts = None if network is None else network.addresses
        if hosts is not None and evaluator:
            hosts = hosts[:-1]  # It has a host, and no address.
        if remote is not None:
            hosts = remote.addresses
        self.tasks = plan_tasks(
            workers, ps, chief, hosts, self._environ, remote is None, evaluator, gpus_per_worker
        )
        if remote is not None:
            remote.place(self.tasks)
        self._serving_workers = bool(chief and ps)
        self.log_dir = pathlib.Path(log_dir or tempfile.mkdtemp(prefix="keras_psplus_"))
        self._console = console
        self._restart, self._kill_grace, self._grace = restart, kill_grace, grace
        graces = GracePeriods(
            failure=failure_grace,
            error=failure_grace if error_grace is None else error_grace,
            idle=failure_grace if idle_grace is None else idle_grace,
            server=server_grace,
            worker=worker_grace,
            evaluator=evaluator_grace,
        )
        self._range = WorkerRange(self.tasks, min_workers)
        self._ends = TaskEnds(
            self._range.first, self._serving_workers, graces, record, self._log, min_workers
        )
        jobs = [EVALUATOR]
        if self._serving_workers:
            jobs.append("worker")
        elif server_restarts and not chief:
            jobs.append("ps")
        self._task_restarts = TaskRestarts(task_restarts, self._log, jobs)
        self._kills = KernelKills()
        self._began: dict[str, float] = {}
        self._processes = TaskProcesses(self._argv, self.log_dir, console, network, warm, remote)
        self._signals = EndingSignals()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pids(self) -> dict[str, int]:
        """Dict from task name to process id."""
        return self._processes.pids

    def log_path(self, name: str) -> pathlib.Path:
        """Returns the path of a task's log file.

        Args:
            name: The task, such as `"worker-1"`.
        """
        return self._processes.log_path(name)

    def environment(self, name: str) -> dict[str, str]:
        """Returns the dict of environment variables with which a task is started.

        Args:
            name: The task, such as `"worker-1"`.
        """
        (task,) = (task for task in self.tasks if task.name == name)
        shared = self._environ if self.network is None else self.network.environment(self._environ)
        told = {TRAINING_END_VARIABLE: "stdin"} if name == EVALUATOR_NAME else {}
        told[GRACE_VARIABLE] = f"{self._grace:g}"
        told.update(self._range.environment, PYTHONUNBUFFERED="1")
        return {**shared, **task.variables, **told}

    def start(self) -> None:
        """Starts all processes."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._signals.catch()
        try:
            if self.network is not None:
                self.network.__enter__()
            for task in self._range.first:
                self._start_task(task)
        except BaseException:
            self.stop()
            raise

    def wait(self, timeout: float | None = None) -> ClusterResult:
        """Waits for the end of the cluster, and ends it where that is due.

        Args:
            timeout: Seconds after which the cluster is ended; `None` for no
                limit.

        Returns:
            A `ClusterResult`.
        """
        deadline = time.monotonic() + timeout if timeout is not None else float("inf")
        timed_out = False
        while self._running() and not self._signals.received:
            now = time.monotonic()
            timed_out = now >= deadline
            if timed_out or now >= self._ends.deadline():
                break
            self._start_again()
            self._range.answer(self._record, self._ends, self._start_task)
            time.sleep(_POLL)
        if self._signals.received[:1] == [signal.SIGTERM] and self._grace:
            self._let_save()
        self.stop()
        return ClusterResult(
            exit_codes=self._ends.codes,
            log_paths={name: self.log_path(name) for name in self._processes},
            chief_has_ended_well=self._serving_workers and self._ends.has_ended_well("chief-0"),
            log_starts=self._processes.log_starts,
            unwritten=self._processes.unwritten,
            first_failure=self._ends.first_failure,
            terminated=tuple(self._ends.terminated),
            timed_out=timed_out,
            signal=next(iter(self._signals.received), None),
            task_restarts=self._task_restarts.used,
        )

    def send_signal(self, name: str, number: int, to_children: bool = True) -> None:
        """Sends a signal to a task, unless the cluster has ended.

        Args:
            name: The task, such as `"worker-1"`.
            number: The signal's number.
            to_children: Whether to its child processes as well.
        """
        self._processes.signal([name], number, to_children)

    def _let_save(self) -> None:
        """Tells the tasks that train to save the job and end, and waits for them."""
        self._forget_restarts()
        trains = self._ends.tell(self._running())
        # Not what they have started, such as processes that read their data.
        self._processes.signal(trains, signal.SIGTERM, to_children=False)
        deadline = time.monotonic() + self._grace
        while left := sorted(set(trains).intersection(self._running())):
            if time.monotonic() >= deadline or len(self._signals.received) > 1:
                self._log(f"{', '.join(left)} ended before saving (--grace={self._grace:g})")
                break
            time.sleep(_POLL)

    def stop(self) -> None:
        """Ends every process that still runs: SIGTERM, then SIGKILL."""
        if self._processes.is_released:
            return
        self._forget_restarts()
        running = self._running()
        self._ends.terminated += running
        try:
            # TensorFlow keeps SIGTERM from ending a task. One that has said why it ends, or has
            # nothing to say, needs no time.
            done = [name for name in running if self._ends.needs_no_time(name)]
            self._processes.signal(done, signal.SIGKILL)
            self._processes.signal([n for n in running if n not in done], signal.SIGTERM)
            deadline = time.monotonic() + self._kill_grace
            while (
                self._running() and time.monotonic() < deadline and len(self._signals.received) < 2
            ):
                time.sleep(_POLL)
            # Also the groups of tasks that have ended: what they started ends with the cluster.
            self._processes.kill()
            while self._running():
                time.sleep(_POLL)
        finally:
            self._processes.release(not running and not self._ends.first_failure)
            if self.network is not None:
                self.network.__exit__(None, None, None)
            self._signals.release()

    def _start_again(self) -> None:
        """Starts the tasks whose time has come."""
        if self._ends.has_ended_well("chief-0") or self._ends.has_trained():
            self._forget_restarts()  # Nobody needs them any more.
            if EVALUATOR_NAME in self._processes:
                # By the end of its input the evaluator knows that no checkpoint is to come.
                self._processes.close_input(EVALUATOR_NAME)
        due = self._task_restarts.pop_due()
        for task in (task for task in self.tasks if task.name in due):
            self._start_task(task)

    def _forget_restarts(self) -> None:
        for name, code in self._task_restarts.pop_all().items():
            self._ends.note(name, code)

    def _start_task(self, task: Task) -> None:
        # A log goes on, also that of a worker that has left.
        is_again = task.name in self._processes
        number = max(self._restart + self._task_restarts.used, int(is_again))
        self._processes.signal([task.name] if is_again else [], signal.SIGKILL)  # Its children.
        self._began[task.name] = time.monotonic()
        environ, rank = self.environment(task.name), self.tasks.index(task)
        pid = self._processes.start(rank, task.name, environ, number, task.name == EVALUATOR_NAME)
        if self._record is not None:
            self._record.task_started(task.name, pid, number)

    def _running(self) -> list[str]:
        """Names of the tasks that have not ended; notes the ends of the others."""
        codes = {
            name: self._processes.exit_code(name)
            for name in self._processes
            if name not in self._ends and name not in self._task_restarts
        }
        fresh = {n: code for n, code in codes.items() if code is not None}
        if self._remote is None:  # Other kernels have counts of their own.
            fresh = {name: self._kills.named(code) for name, code in fresh.items()}
        for name, code in fresh.items():
            self._ends.note(name, code)
            if self._record is not None:
                self._record.task_ended(name, code)
            if name == EVALUATOR_NAME and code and name not in self._ends.terminated:
                self._restart_evaluator(code)
        failed = [name for name in fresh if name in self._ends and self._ends.is_failure(name)]
        is_whole = self._ends.first_failure is None and "chief-0" not in self._ends
        if is_whole and self._task_restarts.can_take({name: fresh[name] for name in failed}):
            for name in failed:
                self._task_restarts.take(name, fresh[name], self._began[name])
                self._ends.forget(name)
        elif failed:
            self._ends.note_failure(failed)
        return [name for name in self._processes if name not in self._ends]

    def _restart_evaluator(self, code: int) -> None:
        """Plans the next start of an evaluator that has failed, or does without it."""
        trains = self._ends.first_failure is None and not self._ends.has_trained()
        if trains and self._task_restarts.can_take({EVALUATOR_NAME: code}):
            self._task_restarts.take(EVALUATOR_NAME, code, self._began[EVALUATOR_NAME])
            self._ends.forget(EVALUATOR_NAME)
        else:
            self._log(f"{EVALUATOR_NAME} has failed ({describe(code)}), and the others go on")

    def _log(self, text: str) -> None:
        if self._console is not None:
            self._console.note(f"keras-psplus: {text}")


# Starts a job again when a task of it has failed, a number of times.


def run(
    make_cluster: Callable[[int], LocalCluster],
    max_restarts: int,
    timeout: float | None = None,
    log: Callable[[str], None] = print,
    sleep: Callable[[float], None] = time.sleep,
) -> ClusterResult:
    """Runs a job until it ends well or its restarts are used up.

    Every attempt is a new cluster. A job that fails soon after its start is started again after a
    pause, which doubles with each such failure in a row. One that was ended by a signal or its
    time-out, whose command line was wrong, or whose chief has ended well without the worker that
    failed, is not started again.

    Args:
        make_cluster: Function of the number of restarts up to now that returns a `LocalCluster`.
        max_restarts: How often the job may be started again, at least 0.
        timeout: Seconds for all attempts together; None for no limit.
        log: Function that takes a line of progress.
        sleep: Function that waits for some seconds.

    Returns:
        The last attempt's `ClusterResult`.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    restart = quick = 0
    while True:
        began = time.monotonic()
        with make_cluster(restart) as cluster:
            result = cluster.wait(None if deadline is None else max(0.0, deadline - began))
        # Of tasks that were started again by themselves, too.
        restart += result.task_restarts
        if not _can_be_restarted(result):
            return result
        if result.chief_has_ended_well:
            log(f"{result.first_failure} has failed, but the chief has ended well: no restart")
            return result
        failed = f"{result.first_failure} has failed ({result.how_it_failed})"
        if restart >= max_restarts:
            if max_restarts:
                log(f"{failed}; no restart of {max_restarts} is left")
            return result
        restart += 1
        quick = quick + 1 if time.monotonic() - began < SHORT_SECONDS else 0
        pause = pause_after(quick)
        if deadline is not None:
            pause = min(pause, max(0.0, deadline - time.monotonic()))
        log(f"{failed}; restart {restart} of {max_restarts} begins in {pause:g} s")
        sleep(pause)


def _can_be_restarted(result: ClusterResult) -> bool:
    return (
        result.first_failure is not None
        and result.signal is None
        and not result.timed_out
        and result.exit_code != WRONG_COMMAND_LINE
    )
