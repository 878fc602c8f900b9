"""Workers of a job that come and go while it runs: `keras-psplus run --workers MIN:MAX`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keras_psplus.cluster.environment import MIN_WORKERS_VARIABLE, Task
from keras_psplus.cluster.launcher.task_ends import TaskEnds
from keras_psplus.cluster.monitor import job_requests
from keras_psplus.cluster.monitor.job_record import JobRecord

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
            job_requests.answer(record.folder, ADD_WORKER, lambda: self._add(ends, start))

    def _add(self, ends: TaskEnds, start: Callable[[Task], None]) -> str:
        for task in self._workers:
            if not ends.is_running(task.name):
                ends.expect(task.name)
                start(task)
                return task.name
        raise job_requests.RequestError(
            f"the job has all {len(self._workers)} workers of its range already: end one of them, "
            "or start the job with a larger range (`--workers MIN:MAX`). "
            f"Received: {', '.join(task.name for task in self._workers)}"
        )
