"""Ends of a cluster's tasks, and deadlines for the others."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence

from keras_psplus.cluster.config import EVALUATOR, JOB_TYPES, task_name
from keras_psplus.cluster.environment import Task
from keras_psplus.cluster.launcher.results import describe
from keras_psplus.cluster.monitor.job_record import JobRecord

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
