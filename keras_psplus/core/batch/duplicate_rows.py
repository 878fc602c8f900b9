"""Duplicate rows in IndexedSlices.

An id that occurs several times in a batch has several rows in the gradient. Summed before they are
sent, they are fewer bytes. But Keras's optimizers apply them one after the other, and the squares
that Adagrad and Adam accumulate differ from the square of the sum. Where one process applies
duplicates separately, they stay separate here; where it sums them, so do all replicas together.
And ids that do not come from the rows of a batch, such as the positions in a sequence, are looked
up once in one process, but by each replica here.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from keras_psplus.core.base.optimizers import unwrapped
from keras_psplus.core.graph import stand_ins

Join: TypeAlias = Callable[[tf.IndexedSlices], tf.IndexedSlices]

# Others would add what their few bits cannot hold.
_DTYPES = tf.float32, tf.float64
_CLIPS = "clipnorm", "clipvalue", "global_clipnorm"
# Some of distinct ids are distinct, too, and in another shape.
_SAME = "Identity", "Reshape", "StridedSlice"


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
    while ids.op.type in _SAME:
        ids = ids.op.inputs[0]
    return ids.op.inputs[0] if ids.op.type == "Unique" and ids.value_index == 0 else None


def are_distinct(gradient: tf.Tensor | tf.IndexedSlices | None) -> bool:
    """Whether the graph shows that no row comes twice: of sparse ids, or a range."""
    if not isinstance(gradient, tf.IndexedSlices):
        return False
    return looked_up(gradient.indices) is not None or _is_range(gradient.indices)


def _is_range(ids: tf.Tensor) -> bool:
    if not tf.is_symbolic_tensor(ids):
        return False
    while ids.op.type in (*_SAME, "Cast", "ExpandDims", "SelectV2", "Squeeze"):
        # Keras lets negative ids count from the end: `where(ids < 0, ids + rows, ids)`.
        ids = ids.op.inputs[-1 if ids.op.type == "SelectV2" else 0]
    first = tf.get_static_value(ids.op.inputs[0]) if ids.op.type == "Range" else None
    # One that counts down to negative ids has others than these.
    return first == 0


def whole_of(gradient: tf.Tensor | tf.IndexedSlices | None) -> Join | None:
    """Function that turns rows of parts of a batch into those of the whole batch.

    Args:
        gradient: That of one part.

    Returns:
        The function, or None where one after the other is what the batch would have.
    """
    if are_distinct(gradient):
        return summed
    places = _places(gradient)
    return functools.partial(_by_place, places=places) if places else None


def _places(gradient: tf.Tensor | tf.IndexedSlices | None) -> int:
    """Number of ids that were looked up, if they come from no row; else 0."""
    if not isinstance(gradient, tf.IndexedSlices) or not tf.is_symbolic_tensor(gradient.indices):
        return 0
    ids = gradient.indices
    # Of a replica without rows there are none.
    while ids.shape.num_elements() is None and ids.op.type in _SAME:
        ids = ids.op.inputs[0]
    return stand_ins.are_equal_everywhere([ids]) and ids.shape.num_elements() or 0


def _by_place(slices: tf.IndexedSlices, places: int) -> tf.IndexedSlices:
    """Sum of gradients of so many rows each, if their ids are the same.

    Its other rows are zeros, as a GPU would wait for the host to leave them out.
    """
    size = tf.size(slices.indices)
    rows = tf.range(size)
    first = rows % places
    is_same = tf.reduce_all(tf.gather(slices.indices, first) == slices.indices)
    numbers = tf.where(is_same, first, rows)
    # Grappler would take the size of `rows` for 0, behind a loop that begins with none.
    values = tf.math.unsorted_segment_sum(slices.values, numbers, size)
    return tf.IndexedSlices(values, slices.indices, slices.dense_shape)


def joined(first: tf.IndexedSlices, second: tf.IndexedSlices) -> tf.IndexedSlices:
    """Gradient of two parts of a batch, as the whole of it would have it."""
    indices = tf.concat([first.indices, second.indices], 0)
    both = tf.IndexedSlices(tf.concat([first.values, second.values], 0), indices, first.dense_shape)
    join = whole_of(second)
    return both if join is None or whole_of(first) is None else join(both)


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
