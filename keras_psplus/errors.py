"""Exceptions of distributed training, with one base class."""

from __future__ import annotations

import re

__all__ = [
    "ChiefLostError",
    "ClusterConfigError",
    "ClusterStartupError",
    "DistributedError",
    "ParameterServerLostError",
    "PeerLostError",
    "StageLostError",
    "TableServerError",
    "TableServerLostError",
    "TaskLostError",
    "WorkersLostError",
]

_TASK = re.compile(r"\b((?:chief|worker|ps|evaluator)-\d+) \(([^\s()]+:\d+)\)")


class DistributedError(Exception):
    """Base class of all errors of a cluster.

    Example:

    ```python
    import keras_psplus as psp

    try:
        model.fit(dataset, epochs=3)
    except psp.errors.TaskLostError as error:
        print(error.task, error.address)
        raise
    ```
    """


class ClusterConfigError(DistributedError, ValueError):
    """The cluster is described wrongly; the message names the variable and a correct value."""


class ClusterStartupError(DistributedError, RuntimeError):
    """A task did not come up in time, or cannot use its address."""


class TaskLostError(DistributedError, RuntimeError):
    """Other tasks have died, hang, or are cut off; the message says what to do.

    Args:
        message: Text that names each lost task as `worker-1 (host:port)`, and the remedy. It may
            have come from another process, so the attributes are read from it.

    Attributes:
        tasks: Pairs of a lost task's name, such as `"worker-1"`, and its `host:port`; empty if it
            is not known which task is lost.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.tasks: tuple[tuple[str, str], ...] = tuple(_TASK.findall(message))

    @property
    def task(self) -> str | None:
        """Name of the first lost task; None if it is not known."""
        return self.tasks[0][0] if self.tasks else None

    @property
    def address(self) -> str | None:
        """Address of the first lost task, `host:port`; None if it is not known."""
        return self.tasks[0][1] if self.tasks else None


class PeerLostError(TaskLostError):
    """Another worker, or a table server of the workers, is lost: restart the job."""


class ParameterServerLostError(TaskLostError):
    """A parameter server has died with the variables that it held: restart the job."""


class WorkersLostError(TaskLostError):
    """No worker has been reachable for `heartbeat_timeout`, so that no step can run."""


class StageLostError(TaskLostError):
    """A worker has died with the variables of its stage: restart the job."""


class ChiefLostError(TaskLostError):
    """The chief has ended without having said so, and the tasks that serve it end."""


class TableServerError(DistributedError, RuntimeError):
    """A parameter server of `HybridStrategy` refuses what it is asked for, or does not answer."""


class TableServerLostError(TableServerError, TaskLostError):
    """A table server does not answer, or is another process than before."""
