"""Lost and silent stages, as the chief sees them."""

import contextlib
import re
import threading
import time
import weakref
from collections.abc import Iterator

import tensorflow as tf

from keras_psplus.cluster.channel import ConnectionWatch
from keras_psplus.cluster.monitor import stalls
from keras_psplus.cluster.ports import control_address
from keras_psplus.core.jobs import failure
from keras_psplus.errors import StageLostError
from keras_psplus.log import logger

# Errors of the chief about a lost stage.


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
        failure.mark_failed()
        raise lost(strategy, number, failure.relevant_line(error)) from error


def _lost_worker(strategy: tf.distribute.Strategy, message: str) -> int | None:
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


# Detection of waits of the chief, and of workers that stop responding.


_LOOK_SECONDS = 1.0


class StallProbe(stalls.StallProbe):
    """Probe of `stalls.Inspector` on the chief."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__("chief-0", strategy.progress)
        self._strategy = weakref.ref(strategy)

    def describe(self, entered: int) -> str:
        strategy = self._strategy()
        silent = stalls.unresponsive_tasks(addresses(strategy))
        missing = ", ".join(
            f"{name} ({stage_of_worker(strategy, _number(name))}; no answer)" for name in silent
        )
        return (
            "the stages; not arrived: "
            f"{missing or 'none; the step may still be traced, or a stage is slow'}"
        )


class Watch:
    """Watchdog that ends the job when a worker does not respond for a while.

    A worker that hangs ends no call, so TensorFlow reports no error. The keepalive of its control
    channel finds that out.
    """

    def __init__(self, strategy: tf.distribute.Strategy, timeout: float) -> None:
        self._strategy, self._timeout = weakref.ref(strategy), timeout
        channels = {name: control_address(a) for name, a in addresses(strategy).items()}
        self._connections = ConnectionWatch(channels, timeout)
        threading.Thread(target=self._run, name="pipeline watch", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(min(_LOOK_SECONDS, self._timeout / 8))
            strategy = self._strategy()
            if strategy is None:
                self._connections.close()
                return
            for name, silence in self._connections.silences().items():
                if silence >= self._timeout:
                    received = f"no answer for {self._timeout:g} s (heartbeat_timeout)"
                    logger.error("%s", lost(strategy, _number(name), received))
                    failure.exit_now()
            del strategy


def addresses(strategy: tf.distribute.Strategy) -> dict[str, str]:
    """Addresses of the workers, by their names."""
    if strategy is None or strategy.task is None:
        return {}
    return {f"worker-{i}": a for i, a in enumerate(strategy.task.cluster["worker"])}


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
