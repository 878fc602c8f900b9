"""Ends a job in which only some workers have stopped within an epoch.

`model.stop_training = True` after a batch ends the epoch on that worker; the others would wait in
their next step for its gradients. The worker posts its stop in the key-value store of TensorFlow's
coordination service, once; a worker that waits in a step reads it. While steps go on, nothing is
sent: TensorFlow keeps some 20 kB for each request for a key that nobody has written, so that only
those steps are looked at that take longer than others do, and more and more seldom.

With `updates=`, workers may step without each other, and a worker that has stopped is missed only
in a step that needs it. There a step has to wait for longer before it reads.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import tensorflow as tf

from keras_psplus.all_reduce.liveness.step_marks import RUNNING, StepMarks

if TYPE_CHECKING:
    from keras_psplus.cluster.monitor.progress import Progress
    from keras_psplus.core.jobs.control import ControlPlane

# So long for each so many workers, whom the first of them answers.
_LOOK_SECONDS, _WORKERS = 1.0, 32
# For a step that may be one without the others: longer than such a step takes.
_ALONE_SECONDS = 10.0


def watch(
    control: ControlPlane, progress: Progress, marks: StepMarks, takes_steps_alone: bool
) -> None:
    """Starts a thread that checks whether a step waits for a stopped worker.

    Args:
        takes_steps_alone: Whether workers may take steps without waiting for the others.
    """
    args = control, progress, marks, takes_steps_alone
    threading.Thread(target=_run, args=args, name="stop watch", daemon=True).start()


def _run(
    control: ControlPlane, progress: Progress, marks: StepMarks, takes_steps_alone: bool
) -> None:
    last, seconds = None, _LOOK_SECONDS * max(1, len(control.names) / _WORKERS)
    least = _ALONE_SECONDS if takes_steps_alone else seconds
    # Seconds that this step has stood still, and those before it; and when to look at it.
    still, usual, due = 0.0, 0.0, least
    while True:
        time.sleep(seconds)
        before, last = last, progress.entered
        stands = before == last and progress.doing == "training step"
        if stands and takes_steps_alone:
            # One that is traced, or has no data, waits for no worker either.
            stands = marks.state == RUNNING
        if not stands:
            usual, still = max(usual / 2, still), 0.0
            due = max(least, 1.5 * usual)
            continue
        still += seconds
        if still < due:
            continue
        due = 2 * still
        try:
            stop = control.stop_of_another()
            if stop is not None and stop.steps <= progress.steps and last == progress.entered:
                control.end_after(stop, progress.at)
                return
        except (tf.errors.OpError, ValueError):
            continue  # The job is about to end.
