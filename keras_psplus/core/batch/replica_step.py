"""One replica's part of one step, and its fraction of the batch.

A replica's gradients and means count by its fraction of the batch, `local_rows / global_rows`, so
that their sum over the replicas is that of the global batch, also when the batch is uneven.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import tensorflow as tf

from keras_psplus.core.graph.metric_losses import MetricLosses

if TYPE_CHECKING:
    import keras

    from keras_psplus.core.graph.compiled_calls import CompiledCalls
    from keras_psplus.engine import Engine

_local = threading.local()


def current_step() -> ReplicaStep | None:
    """The `ReplicaStep` that this thread is in, or None."""
    step: ReplicaStep | None = getattr(_local, "step", None)
    return step


class ReplicaStep:
    """Context of one replica's part of one step.

    Args:
        engine: `keras_psplus.engine.Engine` of the strategy that takes the step.

    Attributes:
        can_sum: Whether replicas can ask each other during the step.
        metric_losses: `MetricLosses` of the step.
        compiled_calls: `CompiledCalls` if XLA is to compile calls of models, else None.
    """

    can_sum = False

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.metric_losses = MetricLosses()
        self.compiled_calls: CompiledCalls | None = None

    @classmethod
    def current(cls) -> Self | None:
        """The step of this kind that this thread is in, or None."""
        step = current_step()
        return step if isinstance(step, cls) else None

    def __enter__(self) -> Self:
        self._outer, _local.step = current_step(), self
        return self

    def __exit__(self, *exc: object) -> None:
        _local.step = self._outer

    @property
    def has_batch_fraction(self) -> bool:
        """Whether the step knows the replica's fraction of the global batch."""
        raise NotImplementedError

    def batch_fraction(self) -> tf.Tensor:
        """The replica's fraction of the global batch, `local_rows / global_rows`, a scalar."""
        raise NotImplementedError

    def scale_by_batch_fraction(self, value: tf.Tensor) -> tf.Tensor:
        """Multiplies by the replica's fraction of the global batch."""
        return value * tf.cast(self.batch_fraction(), value.dtype)

    def result_of(self, metric: keras.metrics.Metric, result: Callable[..., Any]) -> Any:
        """A metric's method `result`, as this step's code is to call it."""
        return result

    def as_read(self, variable: Any, value: tf.Tensor) -> tf.Tensor:
        """The value of a variable on parameter servers, as this step may see it."""
        return value

    def unscale_by_batch_fraction(self, value: tf.Tensor) -> tf.Tensor:
        """Divides by the replica's fraction of the global batch."""
        raise NotImplementedError

    def sum_over_replicas(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums small tensors over all replicas, of a step that `can_sum`."""
        raise NotImplementedError


def current_step_with_batch_fraction() -> ReplicaStep | None:
    """The current step of this thread if its batch fraction is known, else None."""
    step = current_step()
    return step if step is not None and step.has_batch_fraction else None
