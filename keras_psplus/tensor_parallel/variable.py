"""Weights of which each worker of a row keeps a part along one axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus.sharding.places import AxisCut, PieceCut, Place
from keras_psplus.sharding.weight import PartOfWeight
from keras_psplus.tf_internals import record, resource_variable_ops

if TYPE_CHECKING:
    from keras_psplus.sharding.store import ShareStore
    from keras_psplus.sharding.units import Units


class CutWeight(PartOfWeight):
    """A weight that is cut along an axis.

    Layers compute with its part, or gather it.

    Args:
        read: Function of a weight that returns the whole of it, in the graph of a step.
        split: Function of a whole tensor and an axis that returns this worker's part.
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
        super().__init__(store, self._place_of_part(), variable)

    def _place_of_part(self) -> Place:
        return Place(self.cut)

    @property
    def local_shape(self) -> tf.TensorShape:
        """Shape of this worker's part."""
        return tf.TensorShape(self.cut.shard)

    def local(self, is_kept: bool = False) -> tf.Tensor:
        """This worker's part, with its gradient.

        Args:
            is_kept: Whether backward computes with what is made of it here, and not with itself.
        """
        resource_variable_ops.variable_accessed(self)
        with record.stop_recording():
            part = self.part.value()
        self.record(part)
        return part

    def record(self, value: tf.Tensor) -> None:
        record.record_operation(
            "ReadVariableOp",
            [value],
            # As the graph captures it, which is what a `tf.autodiff.ForwardAccumulator` watches.
            [tf.convert_to_tensor(self.handle)],
            backward_function=lambda grad: [grad],
            forward_function=lambda tangent: [self._split(tangent, self.cut.axis)],
        )

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


class PieceWeight(CutWeight):
    """A cut weight whose parts are in pieces along the other axis of a mesh.

    Args:
        units: Gathers parts of their pieces in steps.
    """

    def __init__(self, units: Units, *args: Any) -> None:
        self._units = units
        super().__init__(*args)

    def _place_of_part(self) -> Place:
        cut = self.cut
        return Place(PieceCut(cut, Place.of_parts(cut.shard, cut.copies).parts, cut.number))

    def local(self, is_kept: bool = False) -> tf.Tensor:
        return self._units.gathered(self, is_kept)

    def local_rows(self, indices: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.local(), indices)

    @property
    def written(self) -> tf.Variable:
        self._units.note_write(self)
        return self.part


def cut_of(variable: Any) -> CutWeight | None:
    """The cut weight of a Keras variable, or None if it has none."""
    value = getattr(variable, "_value", variable)
    return value if isinstance(value, CutWeight) else None
