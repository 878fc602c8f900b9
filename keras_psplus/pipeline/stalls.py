"""Detection of waits of the chief, and of workers that stop responding."""

import threading
import time
import weakref

import tensorflow as tf

from keras_psplus.cluster.monitor import stalls
from keras_psplus.cluster.monitor.stalls import PendingWait
from keras_psplus.core.jobs import job_failure
from keras_psplus.log import logger
from keras_psplus.pipeline import failure

_LOOK_SECONDS = 2.0


class StallProbe:
    """Probe of `stalls.Inspector` on the chief.

    Args:
        strategy: `PipelineStrategy`.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = weakref.ref(strategy)

    def look(self) -> dict[int, PendingWait]:
        """Wait that is pending at present, by step."""
        strategy = self._strategy()
        progress = None if strategy is None else strategy.progress
        if progress is None or progress.at is None:
            return {}
        return {progress.entered: PendingWait(f"chief-0 at {progress.at}", self._describe)}

    def _describe(self) -> str:
        strategy = self._strategy()
        silent = stalls.unresponsive_tasks(addresses(strategy))
        missing = ", ".join(
            f"{name} ({failure.stage_of_worker(strategy, _number(name))}; no answer)"
            for name in silent
        )
        return (
            "the stages; not arrived: "
            f"{missing or 'none; the step may still be traced, or a stage is slow'}"
        )


class Watch:
    """Watchdog that ends the job when a worker does not respond for a while.

    A worker that hangs ends no call, so TensorFlow reports no error.

    Args:
        strategy: `PipelineStrategy`.
        timeout: Seconds for which a worker may not answer.
    """

    def __init__(self, strategy: tf.distribute.Strategy, timeout: float) -> None:
        self._strategy, self._timeout = weakref.ref(strategy), timeout
        threading.Thread(target=self._run, name="pipeline watch", daemon=True).start()

    def _run(self) -> None:
        since: dict[str, float] = {}
        while True:
            time.sleep(min(_LOOK_SECONDS, self._timeout / 4))
            strategy = self._strategy()
            if strategy is None:
                return
            try:
                silent = stalls.unresponsive_tasks(addresses(strategy))
            except RuntimeError:
                return  # This process ends, and starts no threads any more.
            now = time.monotonic()
            for name in silent:
                # It may have hung since just after the look before.
                if name in since and now - since[name] + _LOOK_SECONDS >= self._timeout:
                    received = f"no answer for {self._timeout:g} s (heartbeat_timeout)"
                    logger.error("%s", failure.lost(strategy, _number(name), received))
                    job_failure.exit_now()
            since = {name: since.get(name, now) for name in silent}
            del strategy


def addresses(strategy: tf.distribute.Strategy) -> dict[str, str]:
    """Addresses of the workers, by their names."""
    if strategy is None or strategy.task is None:
        return {}
    return {f"worker-{i}": a for i, a in enumerate(strategy.task.cluster["worker"])}


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
