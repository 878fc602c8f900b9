"""Ends of a cluster's tasks, and deadlines for the others."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from keras_psplus.cluster.config import EVALUATOR, JOB_TYPES, task_name
from keras_psplus.cluster.environment import MIN_WORKERS_VARIABLE, Task
from keras_psplus.cluster.monitor import job
from keras_psplus.cluster.monitor.job import JobRecord

_WRAPPER = str(pathlib.Path(__file__).parents[1] / "process" / "exec_with_parent.py")


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """The command of a process that ends when this one does, on Linux."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", _WRAPPER, str(os.getpid()), *command]


# Signals that end a cluster: SIGINT, SIGTERM and SIGHUP of its launcher.


class EndingSignals:
    """Notes the signals, in the main thread, unless they are ignored, as under nohup.

    Attributes:
        received: Their numbers, in the order in which they have come.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._old_handlers: dict[signal.Signals, Any] = {}

    def catch(self) -> None:
        """Notes them from now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old_handlers[number] = signal.signal(number, self._note)

    def release(self) -> None:
        """Has them do what they did before."""
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers = {}

    def _note(self, number: int, _: object) -> None:
        self.received.append(number)


# Result of a local cluster: exit codes, logs, and the first failure.


TIMED_OUT = 124  # as timeout(1)
# Of a script that is called with arguments it does not know, by argparse and by Python itself.
WRONG_COMMAND_LINE = 2


class OutOfMemory(int):
    """The exit code of a process that the kernel has ended for want of memory."""


@dataclasses.dataclass
class ClusterResult:
    """The end of a local cluster.

    Args:
        exit_codes: Dict from task name to exit code, negative for a signal.
        log_paths: Dict from task name to the path of its log.
        first_failure: Name of the task that failed first, or `None`.
        terminated: Names of the tasks that did not end by themselves.
        timed_out: Whether the time-out ended the cluster.
        signal: Number of the signal that ended the cluster, or `None`.
        chief_has_ended_well: Whether the chief of workers that serve it has,
            which is the end of the training.
        log_starts: Dict from task name to the bytes that its log had before, of
            earlier attempts at the job.
        unwritten: Dict from task name to the end of its output, for logs that
            could not be written, as on a full disk.
        task_restarts: How often tasks were started again by themselves.
    """

    exit_codes: dict[str, int]
    log_paths: dict[str, pathlib.Path]
    first_failure: str | None = None
    terminated: tuple[str, ...] = ()
    timed_out: bool = False
    signal: int | None = None
    chief_has_ended_well: bool = False
    log_starts: dict[str, int] = dataclasses.field(default_factory=dict)
    unwritten: dict[str, str] = dataclasses.field(default_factory=dict)
    task_restarts: int = 0

    @property
    def exit_code(self) -> int:
        """The exit code for the whole, in the shell's terms: 0 if all went well."""
        if self.signal is not None:
            return 128 + self.signal
        if self.first_failure is not None:
            code = self.exit_codes[self.first_failure]
            is_worker = self.first_failure.startswith("worker-")
            if self.chief_has_ended_well and is_worker and code < 0:
                return 0  # It was killed, and the chief has done without it.
            return code if code > 0 else 128 - code
        return TIMED_OUT if self.timed_out else 0

    @functools.cached_property
    def logs(self) -> dict[str, str]:
        """Dict from task name to everything it wrote."""
        return {
            name: path.read_bytes()[self.log_starts.get(name, 0) :].decode(errors="replace")
            + self.unwritten.get(name, "")
            for name, path in self.log_paths.items()
        }

    def tails(self, lines: int = 40) -> str:
        """Returns the last lines of every task's log as one text, the first failure last."""
        names = sorted(self.log_paths, key=lambda name: name == self.first_failure)
        return "\n".join(self._tail(name, lines) for name in names)

    def _tail(self, name: str, lines: int) -> str:
        text = self.logs[name].splitlines()
        left_out = len(text) - lines
        head = [f"... ({left_out} lines before)"] if left_out > 0 else []
        body = "\n".join(head + text[-lines:]) or "(no output)"
        return f"--- {name}: {self.how_ended(name)} ---\n{body}"

    @property
    def how_it_failed(self) -> str:
        """Describes the end of the first task to fail, e.g. `"exit code 1"`."""
        assert self.first_failure is not None
        return describe(self.exit_codes[self.first_failure])

    def how_ended(self, name: str) -> str:
        """Describes a task's end, e.g. `"exit code 1, first to fail"`."""
        code = self.exit_codes.get(name)
        text = "not started" if code is None else describe(code)
        if name in self.terminated:
            text += " (still running, terminated by the launcher)"
        return text + (", first to fail" if name == self.first_failure else "")


def describe(code: int) -> str:
    """Describes a process's end, e.g. `"exit code 1"`."""
    if isinstance(code, OutOfMemory):
        return f"ended by signal {-code}, by the kernel for want of memory"
    return f"ended by signal {-code}" if code < 0 else f"exit code {code}"


def exit_code_of(process: subprocess.Popen[bytes]) -> int | None:
    """A process's exit code without reaping it; None while it runs."""
    if process.returncode is not None:
        return process.returncode
    info = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


# Processes that the kernel has ended for want of memory, which leave no word themselves.


_STATISTICS = pathlib.Path("/proc/vmstat")
_FIELD = "oom_kill "


class KernelKills:
    """Tells ends for want of memory from others by SIGKILL, as far as Linux tells.

    The kernel counts such ends, those by the limit of a container included, and does not say whose
    they were. A task that has ended by SIGKILL since the count was lower is taken for one of them.
    """

    def __init__(self) -> None:
        self._seen = _count()

    def named(self, code: int) -> int:
        """Returns the exit code of a process that has just ended, perhaps as `OutOfMemory`."""
        if code != -signal.SIGKILL or _count() <= self._seen:
            return code
        self._seen += 1
        return OutOfMemory(code)


def _count() -> int:
    try:
        lines = _STATISTICS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line[len(_FIELD) :]) for line in lines if line.startswith(_FIELD)), 0)


EVALUATOR_NAME = task_name(EVALUATOR, 0)
_CHIEF = task_name("chief", 0)


@dataclasses.dataclass(frozen=True)
class GracePeriods:
    """Seconds that tasks have after others have ended.

    Attributes:
        failure: For the others, after a task was killed by a signal.
        error: The same, after a task has failed and said itself what was wrong.
        idle: For tasks that only serve others, after a failure, from the end of these others.
        server: For parameter servers, after the end of the training.
        worker: The same for workers that serve a chief, which may have work left.
        evaluator: The same for an evaluator, which has the last checkpoint to evaluate.
    """

    failure: float
    error: float
    idle: float
    server: float
    worker: float
    evaluator: float


class TaskEnds:
    """Record of ended tasks: their failures, and the deadline for the others.

    Args:
        tasks: The cluster's tasks that are started first.
        workers_serve: Whether workers serve a chief.
        record: A `JobRecord` by which tasks say what they do, or None.
        log: Function that takes a line of progress.
        min_workers: How many workers the job needs, if others may leave it; None if it needs all.

    Attributes:
        first_failure: Name of the task that has failed first, or None.
        terminated: Names of the tasks that the launcher ends. Their ends are no failures.
        told: Names of the tasks that are told to save and end, which is no failure either.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        workers_serve: bool,
        graces: GracePeriods,
        record: JobRecord | None,
        log: Callable[[str], None],
        min_workers: int | None = None,
    ) -> None:
        self._of_job = {
            job: [task.name for task in tasks if task.config.task_type == job]
            for job in (*JOB_TYPES, EVALUATOR)
        }
        self._workers_serve, self._graces = workers_serve, graces
        self._record, self._log, self._min_workers = record, log, min_workers
        self._ends: dict[str, tuple[int, float]] = {}  # task name -> (exit code, time)
        self.first_failure: str | None = None
        self.terminated: list[str] = []
        self.told: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._ends

    @property
    def codes(self) -> dict[str, int]:
        """Dict from the names of the tasks that have ended to their exit codes."""
        return {name: code for name, (code, _) in self._ends.items()}

    def note(self, name: str, code: int) -> None:
        """Notes that a task has ended now.

        Args:
            code: Its exit code; the negative number of the signal that has killed it.
        """
        self._ends[name] = (code, time.monotonic())

    def forget(self, name: str) -> None:
        """Forgets the end of a task that is about to be started again."""
        del self._ends[name]

    def is_running(self, name: str) -> bool:
        """Whether a task was started, and has not ended."""
        return name in sum(self._of_job.values(), []) and name not in self._ends

    def expect(self, name: str) -> None:
        """Notes that a worker is about to be started, perhaps once more."""
        self._ends.pop(name, None)
        if name not in self._of_job["worker"]:
            self._of_job["worker"].append(name)

    def is_failure(self, name: str) -> bool:
        """Whether a task that has ended has failed the job."""
        code = self._ends[name][0]
        if not code or name in (*self.terminated, *self.told, EVALUATOR_NAME):
            return False
        chief = _CHIEF if self._of_job["chief"] else task_name("worker", 0)
        if name.startswith("worker-") and self._min_workers is not None:
            others = [worker for worker in self._of_job["worker"] if self.is_running(worker)]
            if len(others) >= self._min_workers:
                self._log(f"{name} has left ({describe(code)}), and {len(others)} go on")
                return False
        # Of workers that serve, one that has failed says itself what is wrong, or may leave.
        serves = name.startswith("ps-") or (
            self._workers_serve
            and name.startswith("worker-")
            and (code < 0 or self._min_workers is not None)
        )
        if not serves or not self.has_ended_well(chief):
            return True
        # The training is over, and nobody needs it any more.
        self._log(f"{name} has ended ({describe(code)}) after {chief} has ended well: no failure")
        return False

    def note_failure(self, names: Sequence[str]) -> None:
        """Notes that tasks have failed at the same moment, if none has before."""
        if self.first_failure is None:
            # A task that was killed by a signal did not follow suit.
            self.first_failure = min(names, key=lambda name: self._ends[name][0] > 0)
            self._log(f"{self.first_failure} has failed, ending the cluster")

    def has_ended_well(self, name: str) -> bool:
        """Whether a task has ended by the exit code 0."""
        return name in self._ends and self._ends[name][0] == 0

    @property
    def trains(self) -> list[str]:
        """Names of the tasks that train, and do not only serve others."""
        return self._of_job["chief"] + ([] if self._workers_serve else self._of_job["worker"])

    def tell(self, running: Sequence[str]) -> list[str]:
        """Notes that those that train are told to save and end; returns their names."""
        trains = [name for name in self.trains if name in running and not self.is_serving(name)]
        self.told += trains
        return trains

    def has_trained(self) -> bool:
        """Whether all tasks that train have ended."""
        return self._all(self.trains)

    def needs_no_time(self, name: str) -> bool:
        """Whether a task that runs has said why it ends, or has nothing to say.

        It has failed and said so, or only serves a chief that has ended.
        """
        return self._have_failed([name]) or (_CHIEF in self._ends and self.is_serving(name))

    def deadline(self) -> float:
        """The `time.monotonic()` at which those that still run are to be ended."""
        chief, workers = self._of_job["chief"], self._of_job["worker"]
        served = chief if self._workers_serve else chief + workers
        if self.first_failure is not None:
            return self._deadline_after_failure(served)
        if not self._all(served):
            return float("inf")
        evaluates = not self._all(self._of_job[EVALUATOR])
        grace = self._graces.evaluator if evaluates else 0.0
        if self._all(chief + workers):
            return self._last(chief + workers) + max(grace, self._graces.server)
        # Of a range, one that has come late has no chief.
        is_range = self._min_workers is not None
        own = self._graces.server if is_range else self._graces.worker
        return self._last(served) + max(grace, own)

    def _deadline_after_failure(self, served: Iterable[str]) -> float:
        assert self.first_failure is not None
        served = [name for name in served if not self.is_serving(name)]
        waited_for = [name for name in served if name not in self._ends]
        if waited_for and self._have_failed(waited_for):
            return 0.0  # They have said what they saw.
        code, end = self._ends[self.first_failure]
        end += self._graces.error if code > 0 else self._graces.failure
        if not waited_for:
            end = min(end, self._last(served) + self._graces.idle)
        return end

    def _have_failed(self, names: Iterable[str]) -> bool:
        """Whether tasks that still run have said that they have failed, and why."""
        return self._record is not None and self._record.have_failed(names)

    def is_serving(self, name: str) -> bool:
        """Whether a task has said that it only serves a chief."""
        return self._record is not None and self._record.is_serving(name)

    def _all(self, names: Iterable[str]) -> bool:
        return all(name in self._ends for name in names)

    def _last(self, names: Iterable[str]) -> float:
        return max(self._ends[name][1] for name in names)


# Restarts of single tasks of a cluster, and the pauses before them.


# A task that fails sooner after its start waits before the next one.
SHORT_SECONDS, LONGEST_PAUSE_SECONDS = 30.0, 30.0


def pause_after(quick_failures: int) -> float:
    """Seconds to wait before a start, after some failures in a row that came soon."""
    return min(2.0 ** (quick_failures - 1), LONGEST_PAUSE_SECONDS) if quick_failures else 0.0


class TaskRestarts:
    """Tasks that have failed and are started again alone.

    Under parameter servers a job goes on without a worker, and takes it in again; a chief and a
    server are parts of the whole job, which is started again with them.

    Args:
        most: How many starts there may be, of all tasks together.
        jobs: Job types of the tasks that can be started again alone.

    Attributes:
        used: How many there have been.
    """

    def __init__(
        self, most: int, log: Callable[[str], None], jobs: Sequence[str] = ("worker",)
    ) -> None:
        self._most, self._log, self.used = most, log, 0
        self._jobs = jobs
        self._quick: dict[str, int] = {}
        # When each is due, and how it has ended.
        self._due: dict[str, tuple[float, int]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._due

    def can_take(self, codes: Mapping[str, int]) -> bool:
        """Whether tasks that have failed at one time can all be started again alone.

        Args:
            codes: Dict from their names to their exit codes, negative for a signal.
        """
        return self.used + len(codes) <= self._most and all(
            name.rpartition("-")[0] in self._jobs and code != WRONG_COMMAND_LINE
            for name, code in codes.items()
        )

    def take(self, name: str, code: int, began: float) -> None:
        """Plans the next start of a task.

        Args:
            began: When it was started, by `time.monotonic()`.
        """
        self.used += 1
        is_quick = time.monotonic() - began < SHORT_SECONDS
        self._quick[name] = self._quick.get(name, 0) + 1 if is_quick else 0
        pause = pause_after(self._quick[name])
        self._due[name] = time.monotonic() + pause, code
        self._log(
            f"{name} has failed ({describe(code)}), and the others go on; restart {self.used} of "
            f"{self._most} begins in {pause:g} s"
        )

    def pop_due(self) -> list[str]:
        """Returns the tasks whose time has come; they are not due any more."""
        names = [name for name, (when, _) in self._due.items() if time.monotonic() >= when]
        for name in names:
            del self._due[name]
        return names

    def pop_all(self) -> dict[str, int]:
        """Gives up all planned starts; returns a dict from tasks to their exit codes."""
        codes = {name: code for name, (_, code) in self._due.items()}
        self._due.clear()
        return codes


# Workers of a job that come and go while it runs: `keras-psplus run --workers MIN:MAX`.


ADD_WORKER = "add-worker"


def environment_of(min_workers: int | None) -> dict[str, str]:
    """Variables that tell tasks with how many workers a job begins."""
    return {} if min_workers is None else {MIN_WORKERS_VARIABLE: str(min_workers)}


class WorkerRange:
    """Starts the workers of a range that are asked for.

    Args:
        tasks: Tasks of the cluster, with all workers that it may come to have.
        min_workers: How many of them are started at first; None for all, which is no range.

    Attributes:
        first: The tasks that are started at first.
        environment: Dict of variables that say so to the tasks.
    """

    def __init__(self, tasks: Sequence[Task], min_workers: int | None) -> None:
        self._workers = [task for task in tasks if task.config.task_type == "worker"]
        late = [] if min_workers is None else self._workers[min_workers:]
        self.first = [task for task in tasks if task not in late]
        self._is_range = min_workers is not None
        self.environment = environment_of(min_workers)

    def answer(
        self, record: JobRecord | None, ends: TaskEnds, start: Callable[[Task], None]
    ) -> None:
        """Starts the workers that are asked for in a job's folder."""
        if self._is_range and record is not None and record.folder is not None:
            job.answer(record.folder, ADD_WORKER, lambda: self._add(ends, start))

    def _add(self, ends: TaskEnds, start: Callable[[Task], None]) -> str:
        if ends.first_failure is not None:
            raise job.RequestError(
                f"the job is ending, as {ends.first_failure} has failed: start it again. "
                f"Received: {ADD_WORKER}"
            )
        for task in self._workers:
            if not ends.is_running(task.name):
                ends.expect(task.name)
                start(task)
                return task.name
        raise job.RequestError(
            f"the job has all {len(self._workers)} workers of its range already: end one of them, "
            "or start the job with a larger range (`--workers MIN:MAX`). "
            f"Received: {', '.join(task.name for task in self._workers)}"
        )
