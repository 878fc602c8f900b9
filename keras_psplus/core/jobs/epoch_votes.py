"""Votes of all workers at the end of an epoch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from keras_psplus.callbacks import CommunicationMonitor

if TYPE_CHECKING:
    import keras

    from keras_psplus.core.jobs.control import ControlPlane


def exchange(
    control: ControlPlane | None, callbacks: keras.callbacks.CallbackList, times: str
) -> list[str]:
    """Stops all workers if one of them stops, and lets monitors know all workers' seconds.

    Args:
        control: `ControlPlane` between the workers, or None.
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
