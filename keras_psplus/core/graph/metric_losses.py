"""Losses that metrics call: numbers of the replica's own rows.

Elsewhere in a step, the value of a loss stands for that of the global batch: weighted by rows, the
values of all replicas add up to it (`core/batch/losses.py`). A metric of a user's own adds its loss
to a state, which is summed over replicas beside a count of its own. So there a loss is what it is.
Keras's `Mean` and `Sum` are given the number of the global batch again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.graph import subgraph

_FUNCTIONS = keras.metrics.MeanMetricWrapper


class MetricLosses:
    """The losses of one replica's step, inside metrics and outside of them.

    Attributes:
        are_local: Whether losses are those of the replica's own rows: inside of metrics.
        correction: Function that returns the factor by which the mask of the next loss would
            correct it, or None.
    """

    def __init__(self) -> None:
        self.are_local = False
        self.correction: Callable[[], tf.Tensor] | None = None
        # Pairs of a loss, and a function that returns the number of the global batch.
        self._known: list[tuple[tf.Tensor, Callable[[], tf.Tensor]]] = []

    @contextlib.contextmanager
    def inside(self, metric: keras.metrics.Metric) -> Iterator[None]:
        """Context of a metric's `update_state`."""
        outer = self.are_local
        # What a function returns is for the mean that calls it.
        is_function = type(metric).update_state is _FUNCTIONS.update_state
        self.are_local = not is_function
        try:
            yield
        finally:
            self.are_local = outer

    def note(self, loss: tf.Tensor, of_batch: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Notes a loss, and what returns the number of the global batch; returns the loss."""
        self._known.append((loss, functools.cache(of_batch)))
        return loss

    def take_correction(self) -> Callable[[], tf.Tensor] | None:
        """The `correction`, which is None after that."""
        correction, self.correction = self.correction, None
        return correction

    def of_batch(self, value: tf.Tensor) -> tf.Tensor | None:
        """The number that a scalar would be with the losses of the global batch.

        Args:
            value: Scalar tensor.

        Returns:
            Scalar tensor, or None if no loss is in it. Of eager tensors, only losses are known.
        """
        for loss, of_batch in self._known:
            if loss is value:
                return of_batch()
        if tf.executing_eagerly() or not hasattr(value, "op"):
            return None
        here = [(loss, f) for loss, f in self._known if _graph_of(loss) is value.graph]
        part = subgraph.Subgraph([value], [loss for loss, _ in here])
        if not here or not part.has(value):
            return None
        if any(operation.op_def.is_stateful for operation in part.operations):
            return value
        used = {t.ref() for operation in part.operations for t in operation.inputs}
        values = {loss.ref(): f() for loss, f in here if loss.ref() in used}
        return part.repeat(values, "loss_of_batch")[0]


def _graph_of(tensor: tf.Tensor) -> tf.Graph | None:
    return getattr(tensor, "graph", None) if hasattr(tensor, "op") else None


def update_state(
    losses: MetricLosses, metric: keras.metrics.Metric, update: Callable[..., Any]
) -> Callable[..., Any]:
    """A metric's method `update_state`, in whose call losses are local.

    Args:
        update: Its bound method.
    """

    @functools.wraps(update)
    def update_with_local_losses(*args: Any, **kwargs: Any) -> Any:
        with losses.inside(metric):
            return update(*args, **kwargs)

    return update_with_local_losses
