"""Who has not come to the step at which this worker waits.

A worker that has stood still at a step for a moment says so in the key-value store of TensorFlow's
coordination service. While steps go on, nothing is sent.
"""

import threading

import tensorflow as tf
from tensorflow.python.eager import context

from keras_psplus.cluster import stalls
from keras_psplus.cluster.config import task_name
from keras_psplus.cluster.stalls import Wait

_ASK_SECONDS = 0.5


class Waits:
    """What `stalls.Inspector` looks at, on a worker.

    Args:
        task: `TaskConfig` of this process.
        progress: `Progress` of this process.
    """

    def __init__(self, task, progress):
        self._task, self._progress = task, progress
        self._others = {
            task_name(job, index): address
            for job, index, address in task.peers(("chief", "worker"))
        }
        self._last = self._posted = None

    def look(self):
        """What is waited for just now."""
        at, entered = self._progress.at, self._progress.entered
        if self._posted not in (None, entered):
            self._tell(context.Context.delete_config_key_value, self._posted)
            self._posted = None
        if at is None:
            return {}
        if entered == self._last and self._posted is None:
            self._tell(context.Context.set_config_key_value, entered, at)
            self._posted = entered
        self._last = entered
        return {entered: Wait(f"{self._task.name} at {at}", lambda: self.describe(entered))}

    def describe(self, entered):
        """Says what is waited for, and who is missing."""
        return f"a collective; not arrived: {self.missing(entered)}"

    def missing(self, entered):
        """Names the workers that have not come to a step.

        Args:
            entered: The step's number, `Progress.entered`.
        """
        silent = stalls.silent(self._others)
        # The first of all workers has the store.
        can_ask = next(iter(self._others), None) not in silent or self._task.is_chief
        missing = [f"{name} (no answer)" for name in silent]
        missing += [
            name
            for name in self._others
            if name not in silent and can_ask and not self._has_come(name, entered)
        ]
        return ", ".join(missing) or "none; one may still trace, or wait for its data"

    def _has_come(self, name, entered):
        try:
            context.context().get_config_key_value(_key(name, entered), int(_ASK_SECONDS * 1000))
        except tf.errors.OpError:
            return False
        return True

    def _tell(self, method, entered, *text):
        """Calls the store from a thread of its own: one that hangs would never answer."""

        def call():
            try:
                method(context.context(), _key(self._task.name, entered), *text)
            except (tf.errors.OpError, ValueError):
                pass  # The job is about to end.

        threading.Thread(target=call, daemon=True).start()


def _key(name, entered):
    return f"keras_psplus/stalls/{entered}/{name}"
