"""Detection of waits of the chief, and of workers that stop responding."""

import threading
import time
import weakref

import tensorflow as tf

from keras_psplus.cluster.channel.connection_watch import ConnectionWatch
from keras_psplus.cluster.monitor import stalls
from keras_psplus.cluster.ports import control_address
from keras_psplus.core.jobs import job_failure
from keras_psplus.log import logger
from keras_psplus.pipeline import failure

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
            f"{name} ({failure.stage_of_worker(strategy, _number(name))}; no answer)"
            for name in silent
        )
        return (
            "the stages; not arrived: "
            f"{missing or 'none; the step may still be traced, or a stage is slow'}"
        )


class Watch:
    """Watchdog that ends the job when a worker does not respond for a while.

    A worker that hangs ends no call, so TensorFlow reports no error. The keepalive of its control
    channel finds that out.

    Args:
        timeout: Seconds for which a worker may not answer.
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
                    logger.error("%s", failure.lost(strategy, _number(name), received))
                    job_failure.exit_now()
            del strategy


def addresses(strategy: tf.distribute.Strategy) -> dict[str, str]:
    """Addresses of the workers, by their names."""
    if strategy is None or strategy.task is None:
        return {}
    return {f"worker-{i}": a for i, a in enumerate(strategy.task.cluster["worker"])}


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
