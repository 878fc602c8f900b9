"""Weights of which each worker of a row keeps a part along one axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.keras_internals.keras_parts import global_state
from keras_psplus.sharding.places import AxisCut, Place
from keras_psplus.sharding.variable import ShareVariable, in_update
from keras_psplus.tf_internals import resource_variable_ops

if TYPE_CHECKING:
    from keras_psplus.sharding.store import ShareStore


class CutWeight(ShareVariable):
    """A weight that is cut along an axis.

    Layers compute with its part, or gather it.

    Args:
        store: The strategy's `store.ShareStore`.
        read: Function of a weight that returns the whole of it, in the graph of a step.
        variable: The Keras variable whose value this is.
        axis: The axis.
    """

    def __init__(
        self,
        store: ShareStore,
        read: Callable[[Any], tf.Tensor],
        variable: keras.Variable,
        axis: int,
    ) -> None:
        shape, dtype = tf.TensorShape(variable._shape), tf.as_dtype(variable._dtype)
        self.cut = AxisCut(shape, axis, store.workers)
        self._read, self.path = read, variable.path
        super().__init__(
            store,
            shape,
            dtype,
            variable.name,
            lambda: Place(self.cut),
            lambda place, shape: tf.zeros(shape, dtype),
            trainable=True,
        )
        assert self.place.cut is self.cut

    @property
    def local_shape(self) -> tf.TensorShape:
        """Shape of this worker's part."""
        return tf.TensorShape(self.cut.shard)

    def local(self) -> tf.Tensor:
        """This worker's part, with its gradient."""
        resource_variable_ops.variable_accessed(self)
        return self.part.value()

    def local_rows(self, indices: tf.Tensor) -> tf.Tensor:
        """Rows of this worker's part, whose gradient is of these rows."""
        resource_variable_ops.variable_accessed(self)
        return self.part.sparse_read(indices)

    def value(self) -> tf.Tensor:
        if in_update:
            return self.part.value()
        if tf.executing_eagerly():
            if current_step() is not None:
                raise RuntimeError(
                    "ModelParallelStrategy computes with cut weights in a `tf.function` alone: "
                    "eager replicas cannot gather them. Call `strategy.run` in a `tf.function`. "
                    f"Received: an eager step that reads '{self.path}'"
                )
            return super().value()
        if global_state.get_global_attribute("symbolic_scope") is not None:
            # Keras asks for shapes: nothing is computed.
            return tf.zeros(self._whole_shape, self.dtype)
        return self._read(self)


def cut_of(variable: Any) -> CutWeight | None:
    """The cut weight of a Keras variable, or None if it has none."""
    value = getattr(variable, "_value", variable)
    return value if isinstance(value, CutWeight) else None
