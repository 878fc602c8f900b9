"""Duplicate rows in IndexedSlices.

An id that occurs several times in a batch has several rows in the gradient. Summed before they are
sent, they are fewer bytes. But Keras's optimizers apply them one after the other, and the squares
that Adagrad and Adam accumulate differ from the square of the sum. Where one process applies
duplicates separately, they stay separate here; where it sums them, so do all replicas together.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.base.optimizers import unwrapped

# Others would add what their few bits cannot hold.
_DTYPES = tf.float32, tf.float64
_CLIPS = "clipnorm", "clipvalue", "global_clipnorm"


def summed(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """A gradient in which no row comes twice.

    Returns:
        `tf.IndexedSlices` with the sums, in the order in which the rows came first.
    """
    if looked_up(slices.indices) is not None:
        return slices
    rows, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)


def looked_up(ids: tf.Tensor) -> tf.Tensor | None:
    """Vector whose distinct values are `ids`, if the graph shows it.

    Args:
        ids: Integer vector.

    Returns:
        That vector, or None if `ids` may have duplicates.
    """
    if not tf.is_symbolic_tensor(ids):
        return None
    # Some of distinct ones are distinct, too, and in another shape.
    while ids.op.type in ("Identity", "Reshape", "StridedSlice"):
        ids = ids.op.inputs[0]
    return ids.op.inputs[0] if ids.op.type == "Unique" and ids.value_index == 0 else None


def are_distinct(gradient: tf.Tensor | tf.IndexedSlices | None) -> bool:
    """Whether the graph shows that no row comes twice, as of lookups of sparse ids."""
    return isinstance(gradient, tf.IndexedSlices) and looked_up(gradient.indices) is not None


def distinct(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """A gradient as `summed` if it is one of rows, else as it is."""
    return summed(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def summed_for(
    optimizer: Any, gradient: tf.Tensor | tf.IndexedSlices | None
) -> tf.Tensor | tf.IndexedSlices | None:
    """A gradient as `summed`, if an optimizer's update is the same; else as it is.

    Args:
        optimizer: Keras optimizer, or anything else, for which nothing is known.
    """
    if not isinstance(gradient, tf.IndexedSlices) or gradient.dtype not in _DTYPES:
        return gradient
    return summed(gradient) if _is_linear(optimizer) else gradient


def _is_linear(optimizer: Any) -> bool:
    """Whether an update changes weights and momenta by multiples of the gradient."""
    inner = unwrapped(optimizer)
    clips = any(getattr(one, name, None) for one in (optimizer, inner) for name in _CLIPS)
    return type(inner) is keras.optimizers.SGD and not clips
