"""One worker's share of a global batch, while the step that it takes is traced.

A global step's gradient is that of the mean over all rows of its batch. Each worker takes the
gradient of the mean over its own rows, times `local_rows / global_rows`; the parameter servers add
these up. What the step does with gradients, it does not do on the worker: it hands them over here.
"""

import threading

import tensorflow as tf
from tensorflow.python.framework import ops

_local = threading.local()


def current():
    """The share whose step this thread is tracing, or None."""
    return getattr(_local, "share", None)


class Share:
    """Context of tracing one worker's part of a step.

    Args:
        weight: Float64 scalar, the share's part of the global batch's rows.
        push: Function of an optimizer, a list of gradients and one of Keras variables that is
            called for each optimizer of the step.

    Attributes:
        handed_over: List of what `push` has returned.
    """

    has_share = True

    def __init__(self, weight, push):
        self._weight, self._push = weight, push
        self._graph = ops.get_default_graph()
        self._optimizers = []
        self.handed_over = []

    def __enter__(self):
        self._outer, _local.share = current(), self
        return self

    def __exit__(self, *exc):
        _local.share = self._outer

    def by_share(self, value):
        """Multiplies by the share's part of the global batch."""
        return value * tf.cast(self._weight, value.dtype)

    def over_share(self, value):
        """Divides by the share's part of the global batch."""
        return value / tf.cast(self._weight, value.dtype)

    def hand_over(self, optimizer, gradients, variables):
        """Takes the gradients that an optimizer is to apply.

        Raises:
            ValueError: If the step applies them in a loop or a branch, or more than once.
        """
        is_inside = ops.get_default_graph() is not self._graph
        if is_inside or any(optimizer is other for other in self._optimizers):
            where = "in a loop, a branch or a tf.function" if is_inside else "twice"
            raise ValueError(
                'With `mode="sync"`, a `train_step` applies the gradients of each optimizer once, '
                "outside of loops, branches and functions of its own: they are applied when those "
                "of all workers are there. Take a tf.function decorator off (`fit` compiles the "
                'whole step), several steps as several batches, or use `mode="async"`. '
                f"Received: {optimizer.name}.apply(), called {where}"
            )
        self._optimizers.append(optimizer)
        self.handed_over.append(self._push(optimizer, gradients, variables))
