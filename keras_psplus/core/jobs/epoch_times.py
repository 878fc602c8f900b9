"""Step times of an epoch, and what all workers exchange at its end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from keras_psplus.callbacks import CommunicationMonitor
from keras_psplus.cluster.monitor import step_times, task_report
from keras_psplus.cluster.monitor.step_times import StepTimes
from keras_psplus.log import logger

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from keras_psplus.core.jobs.control import ControlPlane

# An epoch that loses less is not worth a line.
_LEAST_LOST_SECONDS = 1.0


class EpochTimes:
    """Step times of the present epoch: of this process, or of a chief's workers."""

    def __init__(self, strategy: tf.distribute.Strategy | None) -> None:
        self._progress = getattr(strategy, "progress", None)
        self._begun: dict[str, StepTimes] = {}
        self._times: dict[str, StepTimes] = {}

    def begin(self) -> None:
        if self._progress is not None:
            self._progress.begin_epoch()
            self._begun, self._times = self._progress.times(), {}

    def end(self) -> None:
        """The steps of an epoch are done; validation and callbacks may follow."""
        if self._progress is not None:
            none = StepTimes()
            now = self._progress.times()
            self._times = {n: each.since(self._begun.get(n, none)) for n, each in now.items()}

    def packed(self) -> str:
        """Text of the epoch's times, for the other workers."""
        return json.dumps({name: times.packed() for name, times in self._times.items()})


def exchange(
    control: ControlPlane | None, callbacks: keras.callbacks.CallbackList, times: str
) -> list[str]:
    """Stops all workers if one of them stops, and lets monitors know all workers' seconds.

    Args:
        callbacks: The callbacks of `fit`, which have heard of the end of the epoch.
        times: Text of this worker's step times.

    Returns:
        List of such texts of all workers.
    """
    monitors = [c for c in callbacks.callbacks if isinstance(c, CommunicationMonitor)]
    seconds = max((c.seconds for c in monitors if c.seconds is not None), default=None)
    all_seconds, all_times = [seconds], [times]
    if control is not None:
        # A callback that stops one worker only would leave the others waiting for its gradients.
        # All workers come here, also those whose callbacks have nothing to say.
        vote = json.dumps([bool(callbacks.model.stop_training), seconds, times])
        votes = [json.loads(v) for v in control.exchange("epoch end", vote)]
        callbacks.model.stop_training = any(stops for stops, _, _ in votes)
        all_seconds = [seconds for _, seconds, _ in votes]
        all_times = [times for _, _, times in votes]
    for monitor in monitors:
        monitor.write(all_seconds)
    return all_times


def compare(packed: list[str], epoch: int, is_chief: bool) -> None:
    """Has the chief name the task that held the others up in an epoch.

    Args:
        packed: What `EpochTimes.packed` has returned on each worker.
    """
    if not is_chief:
        return
    times = {
        name: step_times.unpacked(fields)
        for text in packed
        for name, fields in json.loads(text).items()
    }
    slowest = step_times.slowest(times)
    report = task_report.current()
    if report is not None and times:
        report.step_times(epoch, step_times.apart(times), slowest)
    if slowest is None:
        return
    steps = max(each.steps for each in times.values())
    # Steps of a few milliseconds differ by chance.
    if steps * (slowest.seconds - slowest.usual) >= _LEAST_LOST_SECONDS:
        logger.warning("epoch %d, slowest: %s", epoch, slowest)
