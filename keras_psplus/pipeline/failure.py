"""Errors of the chief about a lost stage."""

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from keras_psplus.cluster.monitor import stalls
from keras_psplus.core.jobs import job_failure
from keras_psplus.errors import StageLostError

# Errors after a task is lost. The last two come from leftovers of an earlier step.
_OF_TASKS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.InternalError,
    tf.errors.CancelledError,
)


@contextlib.contextmanager
def translate_errors(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Adds the lost stage's name to TensorFlow's error."""
    try:
        yield
    except _OF_TASKS as error:
        number = None if strategy.task is None else _lost_worker(strategy, str(error))
        if number is None:
            raise
        job_failure.mark_failed()
        raise lost(strategy, number, job_failure.relevant_line(error)) from error


def _lost_worker(strategy: tf.distribute.Strategy, message: str) -> int | None:
    """Number of the worker that an error is about, or None."""
    found = re.search(r"/job:worker/replica:0/task:(\d+)", message)
    if found:
        return int(found.group(1))
    # Some errors say no more than "Socket closed".
    workers = dict(enumerate(strategy.task.cluster["worker"]))
    return next(iter(stalls.unresponsive_tasks(workers)), None)


def lost(strategy: tf.distribute.Strategy, number: int, received: str) -> StageLostError:
    """The error that names a stage, its worker and its layers."""
    address = strategy.task.cluster["worker"][number]
    stage = number % strategy.num_stages
    layers = "none yet" if strategy.plan is None else strategy.plan.stages[stage].described
    return StageLostError(
        f"worker-{number} ({address}), which has {stage_of_worker(strategy, number)} (layers: "
        f"{layers}), stopped answering; the variables that it held are lost. Look into that task's "
        "log, then start the whole job again: with the BackupAndRestore callback training resumes "
        f"where the last backup was made. Received: {received}"
    )


def stage_of_worker(strategy: tf.distribute.Strategy, number: int) -> str:
    """Description of a worker's stage, and of its pipeline if there are several."""
    pipeline, stage = divmod(number, strategy.num_stages)
    return f"stage {stage} of pipeline {pipeline}" if strategy.pipelines > 1 else f"stage {stage}"
