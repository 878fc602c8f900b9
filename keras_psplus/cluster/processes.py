"""A cluster of local processes: started, watched, and ended as one."""

import contextlib
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from keras_psplus.cluster.config import EVALUATOR, JOB_TYPES, task_name
from keras_psplus.cluster.console import Console, OutputPump, warn
from keras_psplus.cluster.environment import (
    RESTART_VARIABLE,
    TOKEN_VARIABLE,
    TRAINING_END_VARIABLE,
    plan_tasks,
)
from keras_psplus.cluster.job_record import JobRecord
from keras_psplus.cluster.log_file import LogFile
from keras_psplus.cluster.results import ClusterResult, describe, exit_code_of
from keras_psplus.cluster.task_restarts import TaskRestarts
from keras_psplus.cluster.warm import WarmProcess, WarmPython

_POLL = 0.05
_EVALUATOR = task_name(EVALUATOR, 0)
_WRAPPER = str(pathlib.Path(__file__).with_name("exec_with_parent.py"))


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
        network: A `chaos.netlab.Lab` with a host for each task, which begins
            and ends with the cluster; None for this machine's own network.
        warm: A `WarmPython` whose forks run a Python script; None starts the command.
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
    ) -> None:
        self._argv = [os.fspath(arg) for arg in argv]
        self._environ = {**os.environ, **(env or {})}
        # Tasks of other jobs on this machine are none of this one's.
        self._environ[TOKEN_VARIABLE] = self._environ.get(TOKEN_VARIABLE) or secrets.token_hex(16)
        self._environ[RESTART_VARIABLE] = str(restart)
        self.network, self._record, self._warm = network, record, warm
        hosts = None if network is None else network.addresses
        if hosts is not None and evaluator:
            hosts = hosts[:-1]  # It has a host, and no address.
        self.tasks = plan_tasks(workers, ps, chief, hosts, self._environ, True, evaluator)
        self._serving_workers = bool(chief and ps)
        self.log_dir = pathlib.Path(log_dir or tempfile.mkdtemp(prefix="keras_psplus_"))
        self._console = console
        self._failure_grace, self._kill_grace = failure_grace, kill_grace
        self._server_grace, self._worker_grace = server_grace, worker_grace
        self._evaluator_grace = evaluator_grace
        self._error_grace = failure_grace if error_grace is None else error_grace
        self._idle_grace = failure_grace if idle_grace is None else idle_grace
        self._restart = restart
        jobs = [EVALUATOR]
        if self._serving_workers:
            jobs.append("worker")
        elif server_restarts and not chief:
            jobs.append("ps")
        self._task_restarts = TaskRestarts(task_restarts, self._log, jobs)
        self._began: dict[str, float] = {}
        self._processes: dict[str, subprocess.Popen[bytes] | WarmProcess] = {}
        self._pumps: list[OutputPump] = []
        self._logs: dict[str, LogFile] = {}
        self._log_starts: dict[str, int] = {}
        # Of tasks that were started again.
        self._replaced: list[tuple[subprocess.Popen[bytes] | WarmProcess, LogFile]] = []
        self._ends: dict[str, tuple[int, float]] = {}  # task name -> (exit code, time)
        self._terminated: list[str] = []
        self._first_failure: str | None = None
        self._signals: list[int] = []
        self._old_handlers: dict[signal.Signals, Any] = {}
        self._released = False
        self._release_lock = threading.Lock()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pids(self) -> dict[str, int]:
        """Dict from task name to process id."""
        return {name: process.pid for name, process in self._processes.items()}

    def log_path(self, name: str) -> pathlib.Path:
        """Returns the path of a task's log file.

        Args:
            name: The task, such as `"worker-1"`.
        """
        return self.log_dir / f"{name}.log"

    def environment(self, name: str) -> dict[str, str]:
        """Returns the dict of environment variables with which a task is started.

        Args:
            name: The task, such as `"worker-1"`.
        """
        (task,) = (task for task in self.tasks if task.name == name)
        shared = self._environ if self.network is None else self.network.environment(self._environ)
        told = {TRAINING_END_VARIABLE: "stdin"} if name == _EVALUATOR else {}
        return {**shared, "PYTHONUNBUFFERED": "1", **task.variables, **told}

    def start(self) -> None:
        """Starts all processes."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                    self._old_handlers[number] = signal.signal(number, self._on_signal)
        try:
            if self.network is not None:
                self.network.__enter__()
            for rank, task in enumerate(self.tasks):
                self._start_task(rank, task)
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
        while self._running() and not self._signals:
            now = time.monotonic()
            timed_out = now >= deadline
            if timed_out or now >= self._end_of_grace():
                break
            self._start_again()
            time.sleep(_POLL)
        self.stop()
        return ClusterResult(
            exit_codes={name: code for name, (code, _) in self._ends.items()},
            log_paths={task.name: self.log_path(task.name) for task in self.tasks},
            chief_has_ended_well=self._serving_workers and self._ends.get("chief-0", [1])[0] == 0,
            log_starts=self._log_starts,
            unwritten={name: log.lost for name, log in self._logs.items() if log.lost},
            first_failure=self._first_failure,
            terminated=tuple(self._terminated),
            timed_out=timed_out,
            signal=self._signals[0] if self._signals else None,
            task_restarts=self._task_restarts.used,
        )

    def send_signal(self, name: str, number: int) -> None:
        """Sends a signal to a task and to what it has started, unless the cluster has ended.

        Args:
            name: The task, such as `"worker-1"`.
            number: The signal's number.
        """
        with self._release_lock:
            if not self._released:
                self._signal_groups([name], number)

    def stop(self) -> None:
        """Ends every process that still runs: SIGTERM, then SIGKILL."""
        if self._released:
            return
        self._forget_restarts()
        running = self._running()
        self._terminated += running
        try:
            # TensorFlow keeps SIGTERM from ending a task. One that has said why it ends, or has
            # nothing to say, needs no time.
            done = [name for name in running if self._have_failed([name]) or self._is_left(name)]
            self._signal_groups(done, signal.SIGKILL)
            self._signal_groups([name for name in running if name not in done], signal.SIGTERM)
            deadline = time.monotonic() + self._kill_grace
            while self._running() and time.monotonic() < deadline and len(self._signals) < 2:
                time.sleep(_POLL)
            # Also the groups of tasks that have ended: what they started ends with the cluster.
            self._signal_groups(self._processes, signal.SIGKILL)
            while self._running():
                time.sleep(_POLL)
        finally:
            self._release()

    def _start_again(self):
        """Starts the tasks whose time has come."""
        if self._ends.get("chief-0", (1,))[0] == 0 or self._has_trained():
            self._forget_restarts()  # Nobody needs them any more.
            if _EVALUATOR in self._processes:
                # By the end of its input the evaluator knows that no checkpoint is to come.
                self._processes[_EVALUATOR].stdin.close()
        due = self._task_restarts.pop_due()
        for rank, task in enumerate(self.tasks):
            if task.name in due:
                process = self._processes[task.name]
                self._signal_groups([task.name], signal.SIGKILL)  # What it has started.
                with self._release_lock:
                    process.wait()  # Its id may be another process's from here on.
                    self._replaced.append((process, self._logs[task.name]))
                    self._start_task(rank, task, is_again=True)

    def _forget_restarts(self):
        now = time.monotonic()
        for name, code in self._task_restarts.pop_all().items():
            self._ends[name] = (code, now)

    def _start_task(self, rank, task, is_again=False):
        self._logs[task.name] = log = self._open_log(task.name, is_again)
        self._began[task.name] = time.monotonic()
        self._processes[task.name] = process = self._start_process(rank, task.name)
        if self._record is not None:
            number = self._restart + self._task_restarts.used
            self._record.task_started(task.name, process.pid, number)
        pump = OutputPump(task.name, process.stdout, log, self._console)
        self._pumps.append(pump)
        pump.start()

    def _start_process(self, rank, name):
        environ = self.environment(name)
        if self._warm is not None and self.network is None:
            return self._warm.start(self._argv[1:], environ, has_input=name == _EVALUATOR)
        command = self._argv
        if self.network is not None:
            command = [*self.network.inside(rank), *command]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", _WRAPPER, str(os.getpid()), *command]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE if name == _EVALUATOR else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,  # its own group: signals reach what it starts as well
        )

    def _open_log(self, name, is_again):
        on_warning = warn if self._console is None else self._console.warn
        goes_on = is_again or bool(self._restart)
        number = self._restart + self._task_restarts.used
        heading = f"keras-psplus: restart {number}\n" if goes_on else ""
        log = LogFile(self.log_path(name), goes_on, on_warning, heading)
        self._log_starts.setdefault(name, log.size)
        return log

    def _running(self):
        """Names of the tasks that have not ended; notes the ends of the others."""
        fresh = []
        for name, process in self._processes.items():
            if name not in self._ends and name not in self._task_restarts:
                code = exit_code_of(process)
                if code is not None:
                    fresh.append((code, name))
        for code, name in fresh:
            self._ends[name] = (code, time.monotonic())
            if self._record is not None:
                self._record.task_ended(name, code)
            if name == _EVALUATOR and code and name not in self._terminated:
                self._restart_evaluator(code)
        failed = [(code, name) for code, name in fresh if self._has_failed(name, code)]
        is_whole = self._first_failure is None and "chief-0" not in self._ends
        if is_whole and all(self._task_restarts.can_take(name, code) for code, name in failed):
            for code, name in failed:
                self._task_restarts.take(name, code, self._began[name])
                del self._ends[name]
            failed = []
        if failed and self._first_failure is None:
            # Ended at the same moment: a task killed by a signal (negative) did not follow suit.
            self._first_failure = min(failed, key=lambda end: end[0] > 0)[1]
            self._log(f"{self._first_failure} has failed, ending the cluster")
        return [name for name in self._processes if name not in self._ends]

    def _restart_evaluator(self, code):
        """Plans the next start of an evaluator that has failed, or does without it."""
        trains = self._first_failure is None and not self._has_trained()
        if trains and self._task_restarts.can_take(_EVALUATOR, code):
            self._task_restarts.take(_EVALUATOR, code, self._began[_EVALUATOR])
            del self._ends[_EVALUATOR]
        else:
            self._log(f"{_EVALUATOR} has failed ({describe(code)}), and the others go on")

    def _has_trained(self):
        """Whether all tasks that compute have ended."""
        jobs = ("chief",) if self._serving_workers else ("chief", "worker")
        return self._all_ended([t.name for t in self.tasks if t.config.task_type in jobs])

    def _has_failed(self, name, code):
        if not code or name in self._terminated:
            return False
        if name == _EVALUATOR:
            return False
        chief = "chief-0" if "chief-0" in self._processes else "worker-0"
        if not name.startswith("ps-") or self._ends.get(chief, (1, None))[0]:
            return True
        # The training is over, and nobody needs it any more.
        self._log(f"{name} has ended ({describe(code)}) after {chief} has ended well: no failure")
        return False

    def _end_of_grace(self):
        """The time at which those still running are terminated."""
        chief, workers = (
            [t.name for t in self.tasks if t.config.task_type == job] for job in JOB_TYPES[:2]
        )
        served = chief if self._serving_workers else chief + workers
        if self._first_failure is not None:
            served = [name for name in served if not self._is_serving(name)]
            waited_for = [name for name in served if name not in self._ends]
            if waited_for and self._have_failed(waited_for):
                return 0.0  # They have said what they saw.
            code, end = self._ends[self._first_failure]
            end += self._error_grace if code > 0 else self._failure_grace
            if self._all_ended(served):
                end = min(end, self._last_end(served) + self._idle_grace)
            return end
        if not self._all_ended(served):
            return float("inf")
        # An evaluator has the last checkpoint to evaluate.
        evaluates = _EVALUATOR in self._processes and _EVALUATOR not in self._ends
        grace = self._evaluator_grace if evaluates else 0.0
        if self._all_ended(chief + workers):
            return self._last_end(chief + workers) + max(grace, self._server_grace)
        return self._last_end(served) + max(grace, self._worker_grace)

    def _have_failed(self, names):
        """Whether tasks that still run have said that they have failed, and why."""
        return self._record is not None and self._record.have_failed(names)

    def _is_serving(self, name):
        """Whether a task has said that it only serves a chief."""
        return self._record is not None and self._record.is_serving(name)

    def _is_left(self, name):
        """Whether a task only serves a chief that has ended."""
        return "chief-0" in self._ends and self._is_serving(name)

    def _all_ended(self, names):
        return all(name in self._ends for name in names)

    def _last_end(self, names):
        return max(self._ends[name][1] for name in names)

    def _signal_groups(self, names, number):
        for name in names:
            # The processes are not reaped before `_release`, so that the ids are still theirs.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._processes[name].pid, number)

    def _release(self):
        with self._release_lock:
            self._released = True  # from here on, a process id may be another process's
        for process in self._processes.values():
            process.wait()
        for pump in self._pumps:
            pump.join(5.0)
        for process in [*self._processes.values(), *(process for process, _ in self._replaced)]:
            process.stdout.close()
            if process.stdin is not None:
                process.stdin.close()
        for log in [*self._logs.values(), *(log for _, log in self._replaced)]:
            log.close()
        self._pumps = []
        if self.network is not None:
            self.network.__exit__(None, None, None)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers = {}

    def _on_signal(self, number, _):
        self._signals.append(number)

    def _log(self, text):
        if self._console is not None:
            self._console.note(f"keras-psplus: {text}")
