"""Ends a job of which one worker has stopped within an epoch, and the others have not.

`model.stop_training = True` after a batch ends the epoch on that worker; the others would wait in
their next step for its gradients. The worker says so in the key-value store of TensorFlow's
coordination service, once; a worker that stands still in a step reads it. While steps go on,
nothing is sent.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import tensorflow as tf

if TYPE_CHECKING:
    from keras_psplus.cluster.progress import Progress
    from keras_psplus.core.control import ControlPlane

# So long for each so many workers, whom the first of them answers.
_LOOK_SECONDS, _WORKERS = 1.0, 32


def watch(control: ControlPlane, progress: Progress) -> None:
    """Begins to look, from a separate thread, whether a step waits for a worker that has stopped.

    Args:
        control: `ControlPlane` of this process.
        progress: `Progress` of this process.
    """
    threading.Thread(target=_run, args=(control, progress), name="stop watch", daemon=True).start()


def _run(control, progress):
    last, seconds = None, _LOOK_SECONDS * max(1, len(control.names) / _WORKERS)
    while True:
        time.sleep(seconds)
        before, last = last, progress.entered
        if before != last or progress.doing != "training step":
            continue
        try:
            stop = control.stop_of_another()
            if stop is not None and stop.steps <= progress.steps and last == progress.entered:
                control.end_after(stop, progress.at)
                return
        except (tf.errors.OpError, ValueError):
            continue  # The job is about to end.
