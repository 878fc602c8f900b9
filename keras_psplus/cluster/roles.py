"""Roles of processes in their cluster, for scripts that all tasks run."""

from keras_psplus import activation
from keras_psplus.cluster.config import EVALUATOR, ClusterConfigError, TaskConfig
from keras_psplus.cluster.discovery.discovery import find_task_config


def task_type() -> str | None:
    """Returns this process's task type: `"chief"`, `"worker"`, `"ps"` or `"evaluator"`.

    Example:

    ```python
    if keras_psplus.task_type() == "evaluator":
        keras_psplus.SidecarEvaluator(model, data, "checkpoints").start()
    else:
        model.fit(...)
    ```

    Returns:
        A string, or None if the process trains alone.

    Raises:
        ClusterConfigError: If the cluster is described wrongly.
    """
    activation.activate()
    task = find_task_config()
    return None if task is None else task.task_type


def is_evaluator() -> bool:
    """Whether this process stands beside its cluster, to evaluate what that trains."""
    return task_type() == EVALUATOR


def refuse_evaluator(strategy: str, task: TaskConfig | None) -> None:
    """Refuses to make a strategy in a process that is not in the cluster.

    Raises:
        ClusterConfigError: If the task is an evaluator.
    """
    if task is not None and task.task_type == EVALUATOR:
        raise ClusterConfigError(
            f"An evaluator is not in the cluster, and has no part in {strategy}. Make the strategy "
            "by `keras_psplus.strategy_from_env()`, which is TensorFlow's default one in an "
            "evaluator, or make none if `keras_psplus.task_type() == 'evaluator'`. "
            f"Received: {task.describe()}"
        )


def refuse_training(method: str) -> None:
    """Refuses to train in an evaluator: it would train its own model.

    Raises:
        RuntimeError: If this process is an evaluator.
    """
    if is_evaluator():
        raise RuntimeError(
            f"This process is an evaluator, and trains nothing. Where `keras_psplus.task_type() == "
            f"'evaluator'`, call `keras_psplus.SidecarEvaluator(...).start()` instead of {method}. "
            f"Received: {method}() in an evaluator"
        )
