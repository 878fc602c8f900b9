"""Weights of which each worker of a row keeps a part along one axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus.sharding.places import AxisCut, Place
from keras_psplus.sharding.weight import PartOfWeight
from keras_psplus.tf_internals import record, resource_variable_ops

if TYPE_CHECKING:
    from keras_psplus.sharding.store import ShareStore


class CutWeight(PartOfWeight):
    """A weight that is cut along an axis.

    Layers compute with its part, or gather it.

    Args:
        read: Function of a weight that returns the whole of it, in the graph of a step.
        split: Function of a whole tensor and an axis that returns this worker's part.
        parts: Number of parts.
    """

    def __init__(
        self,
        store: ShareStore,
        read: Callable[[Any], tf.Tensor],
        split: Callable[[tf.Tensor, int], tf.Tensor],
        variable: keras.Variable,
        axis: int,
        parts: int,
    ) -> None:
        shape = tf.TensorShape(variable._shape)
        self.cut = AxisCut(shape, axis, parts, store.workers // parts)
        self._read, self._split = read, split
        super().__init__(store, Place(self.cut), variable)

    @property
    def local_shape(self) -> tf.TensorShape:
        """Shape of this worker's part."""
        return tf.TensorShape(self.cut.shard)

    def local(self) -> tf.Tensor:
        """This worker's part, with its gradient."""
        resource_variable_ops.variable_accessed(self)
        with record.stop_recording():
            part = self.part.value()
        record.record_operation(
            "ReadVariableOp",
            [part],
            # As the graph captures it, which is what a `tf.autodiff.ForwardAccumulator` watches.
            [tf.convert_to_tensor(self.handle)],
            backward_function=lambda grad: [grad],
            forward_function=lambda tangent: [self._split(tangent, self.cut.axis)],
        )
        return part

    def local_rows(self, indices: tf.Tensor) -> tf.Tensor:
        """Rows of this worker's part, whose gradient is of these rows."""
        resource_variable_ops.variable_accessed(self)
        return self.part.sparse_read(indices)

    def _error_of_eager_read(self) -> RuntimeError:
        return RuntimeError(
            "ModelParallelStrategy computes with cut weights in a `tf.function` alone: "
            "eager replicas cannot gather them. Call `strategy.run` in a `tf.function`. "
            f"Received: an eager step that reads '{self.path}'"
        )

    def _value_in_step(self) -> tf.Tensor:
        return self._read(self)


def cut_of(variable: Any) -> CutWeight | None:
    """The cut weight of a Keras variable, or None if it has none."""
    value = getattr(variable, "_value", variable)
    return value if isinstance(value, CutWeight) else None
