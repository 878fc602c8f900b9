"""Texts of strategies: what they were made with, and for which cluster."""

from typing import Any

from keras_psplus.cluster.config import TaskConfig


def describe(strategy: object, task: TaskConfig | None, **options: Any) -> str:
    """Returns the text that `repr` of a strategy shows.

    Args:
        **options: Arguments of its constructor; those that are None, False or 0 are left out.

    Example:

    ```python
    describe(strategy, task, compression="int8", updates=None)
    # "<MultiWorkerMirroredStrategy(compression='int8'): worker-0 of 2 worker>"
    ```
    """
    given = [f"{name}={value!r}" for name, value in options.items() if not _is_default(value)]
    where = "no cluster"
    if task is not None:
        jobs = ", ".join(f"{len(tasks)} {job}" for job, tasks in task.cluster.items())
        where = f"{task.name} of {jobs}"
    return f"<{type(strategy).__name__}({', '.join(given)}): {where}>"


def _is_default(value: object) -> bool:
    return value is None or value is False or (isinstance(value, int) and value == 0)
