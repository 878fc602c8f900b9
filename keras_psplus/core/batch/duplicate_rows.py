"""Duplicate rows in IndexedSlices.

An id that occurs several times in a batch has several rows in the gradient. Summed before they are
sent, they are fewer bytes. But Keras's optimizers apply them one after the other, and the squares
that Adagrad and Adam accumulate differ from the square of the sum. Where one process applies
duplicates separately, they stay separate here; where it sums them, so do all replicas together.
And ids that do not come from the rows of a batch, such as the positions in a sequence, are looked
up once in one process, but by each replica here.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from keras_psplus.core.base.optimizers import unwrapped
from keras_psplus.core.graph import stand_ins
from keras_psplus.core.graph.variables import gradient_shape
from keras_psplus.updates.base import Form, Grads

# Of the rows of all parts, and the vector of their counts.
Join: TypeAlias = Callable[[tf.IndexedSlices, tf.Tensor], tf.IndexedSlices]
Joins: TypeAlias = Sequence[Join | None]

# Others would add what their few bits cannot hold.
_DTYPES = tf.float32, tf.float64
_CLIPS = "clipnorm", "clipvalue", "global_clipnorm"
_MARK = "_comes_from_no_row"
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


def whole_of(gradient: tf.Tensor | tf.IndexedSlices | None, keeps_size: bool = True) -> Join | None:
    """Function that turns rows of parts of a batch into those of the whole batch.

    Args:
        keeps_size: Whether zeros may stay in the place of rows that were added to others, as a GPU
            would wait for the host to leave them out.

    Returns:
        The function, or None where one after the other is what the batch would have.
    """
    if are_distinct(gradient):
        return lambda slices, counts: summed(slices)
    is_constant = isinstance(gradient, tf.IndexedSlices) and _come_from_no_row(gradient.indices)
    return functools.partial(_by_place, keeps_size=keeps_size) if is_constant else None


def forms_of(gradients: Grads, variables: Sequence[Any]) -> list[Form | None]:
    """Types of gradients to accumulate, with what turns rows of batches into those of one.

    Returns:
        List with the `Form` of each gradient, None for None.
    """
    pairs = zip(gradients, map(gradient_shape, variables))
    return [None if g is None else _form_of(g, shape) for g, shape in pairs]


def _form_of(gradient: tf.Tensor | tf.IndexedSlices, shape: Sequence[int]) -> Form:
    if not isinstance(gradient, tf.IndexedSlices):
        return Form(gradient.dtype, None, shape)
    form = Form(gradient.dtype, gradient.indices.dtype, shape)
    if are_distinct(gradient):
        return form._replace(join=summed)
    return form._replace(add=whole_of(gradient, keeps_size=False))


def _come_from_no_row(ids: tf.Tensor) -> bool:
    """Whether ids are constants, or computed of the lengths of sequences."""
    if not tf.is_symbolic_tensor(ids):
        return False
    if hasattr(ids, _MARK):
        return True
    # Of a replica without rows there are none.
    while ids.shape.num_elements() is None and ids.op.type in ("Identity", "StridedSlice"):
        ids = ids.op.inputs[0]
    lengths, met = {id(op) for op in stand_ins.sources([ids]) if _is_length(op)}, set[int]()
    return stand_ins.are_equal_everywhere([ids], lengths, met) and bool(
        # Variables of any size may be each replica's own.
        met or ids.shape.num_elements()
    )


def _is_length(op: tf.Operation) -> bool:
    """Whether an operation takes sizes of a tensor, other than its rows, from its shape.

    Replicas may have padded their rows to different lengths: `_by_place` sees to that.
    """
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return False
    begin = tf.get_static_value(op.inputs[1])
    return begin is not None and begin[0] > 0 and not op.get_attr("begin_mask")


def _by_place(slices: tf.IndexedSlices, counts: tf.Tensor, keeps_size: bool) -> tf.IndexedSlices:
    """Sum of gradients of parts with the same ids; those without rows have none."""
    places = tf.reduce_max(counts)
    is_same = tf.reduce_all(tf.logical_or(counts == places, counts == 0))
    size = tf.size(slices.indices)
    rows = tf.range(size)
    first = rows % tf.maximum(places, 1)
    is_same &= tf.reduce_all(tf.gather(slices.indices, first) == slices.indices)
    numbers = tf.where(is_same, first, rows)
    indices = slices.indices
    if not keeps_size:
        size = tf.where(is_same, places, size)
        indices = indices[:size]
        # Of what was read from variables, it does not show.
        setattr(indices, _MARK, True)
    # Grappler would take the size of `rows` for 0, behind a loop that begins with none.
    values = tf.math.unsorted_segment_sum(slices.values, numbers, size)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def joined(first: tf.IndexedSlices, second: tf.IndexedSlices) -> tf.IndexedSlices:
    """Gradient of two parts of a batch, as the whole of it would have it.

    The first may be the result for several parts.
    """
    indices = tf.concat([first.indices, second.indices], 0)
    both = tf.IndexedSlices(tf.concat([first.values, second.values], 0), indices, first.dense_shape)
    join = whole_of(second)
    if join is None or whole_of(first) is None:
        return both
    return join(both, tf.shape(second.indices))


def distinct(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor | tf.IndexedSlices:
    """A gradient as `summed` if it is one of rows, else as it is."""
    return summed(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def summed_for(
    optimizer: Any, gradient: tf.Tensor | tf.IndexedSlices | None
) -> tf.Tensor | tf.IndexedSlices | None:
    """A gradient as `summed`, if an optimizer's update is the same; else as it is."""
    if not isinstance(gradient, tf.IndexedSlices) or gradient.dtype not in _DTYPES:
        return gradient
    return summed(gradient) if _is_linear(optimizer) else gradient


def _is_linear(optimizer: Any) -> bool:
    """Whether an update changes weights and momenta by multiples of the gradient."""
    inner = unwrapped(optimizer)
    clips = any(getattr(one, name, None) for one in (optimizer, inner) for name in _CLIPS)
    return type(inner) is keras.optimizers.SGD and not clips
