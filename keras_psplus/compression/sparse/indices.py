"""Indices of elements: in two bytes each, and what is put there."""

import tensorflow as tf

from keras_psplus.native.devices import has_gpus

SEGMENT = 1 << 16


def encode_indices_u16(indices: tf.Tensor, size: int) -> tuple[tf.Tensor, ...]:
    """Leaves of each index what two bytes can hold.

    Of rows that are longer, it is the index in a segment of 65,536 elements; how many indices come
    before each segment tells which one (Lin et al., 2017, send two bytes for each gap instead, but
    a gap may be longer than they can say).

    Args:
        indices: int32 or int64 tensor of shape `(rows, count)`, ascending in each row.
        size: Int: how long a row is.

    Returns:
        Tuple of an uint16 tensor of shape `(rows, count)` and, if a row is longer than a segment,
        an int32 tensor of shape `(rows, segments - 1)`.
    """
    if size <= SEGMENT:
        return (tf.cast(indices, tf.uint16),)
    low = tf.cast(tf.bitwise.bitwise_and(indices, SEGMENT - 1), tf.uint16)
    firsts = tf.range(SEGMENT, size, SEGMENT, indices.dtype)
    firsts = tf.broadcast_to(firsts, [tf.shape(indices)[0], tf.size(firsts)])
    # With int32 as the type of what comes out, there is no such kernel for GPUs.
    starts = tf.searchsorted(indices, firsts, out_type=tf.int64)
    return low, tf.ensure_shape(
        tf.cast(starts, tf.int32), [indices.shape[0], _further_segments(size)]
    )


def decode_indices_u16(low: tf.Tensor, *starts: tf.Tensor) -> tf.Tensor:
    """The inverse of `encode_indices_u16`; int64 on GPUs, and otherwise int32."""
    low = tf.cast(low, tf.int64 if has_gpus() else tf.int32)
    if not starts:
        return low
    rows, count = tf.unstack(tf.shape(low))
    of_rows = _by_search if has_gpus() else _by_ranges
    return low + of_rows(starts[0], rows, count)


def _by_ranges(starts: tf.Tensor, rows: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Segment of each index; `RaggedRange` has a kernel for CPUs only."""
    last = tf.fill([rows, 1], count)
    starts, ends = tf.concat([0 * last, starts], 1), tf.concat([starts, last], 1)
    # Ranges that rise by one from index to index, which has to be taken off them.
    first = starts + SEGMENT * tf.range(tf.shape(starts)[1])
    begin, end = (tf.reshape(each, [-1]) for each in (first, first + ends - starts))
    rising = tf.raw_ops.RaggedRange(starts=begin, limits=end, deltas=1).rt_dense_values
    return tf.reshape(rising, [rows, count]) - tf.range(count)


def _by_search(starts: tf.Tensor, rows: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """The same by binary search, with kernels for GPUs; slower on processors."""
    places = tf.broadcast_to(tf.range(tf.cast(count, tf.int64)), [rows, count])
    begun = tf.searchsorted(tf.cast(starts, tf.int64), places, "right", out_type=tf.int64)
    return SEGMENT * begun


def scatter_rows(values: tf.Tensor, indices: tf.Tensor, size: int | tf.Tensor) -> tf.Tensor:
    """Makes rows of zeros, or of False, with values at their indices.

    Args:
        values: Tensor of shape `(rows, count)`, or a scalar for all indices.
        indices: int32 or int64 tensor of shape `(rows, count)`, without repetitions in a row.
        size: How long a row is: an int, or an int64 scalar.

    Returns:
        Tensor of shape `(rows * size,)`.
    """
    rows = tf.shape(indices, tf.int64)[0]
    starts = tf.range(rows)[:, tf.newaxis] * size
    # Where nothing is added up, this is many times as fast as tf.scatter_nd.
    return tf.raw_ops.SparseToDense(
        sparse_indices=tf.reshape(starts + tf.cast(indices, tf.int64), [-1]),
        output_shape=tf.reshape(rows * size, [1]),
        sparse_values=values if values.shape.rank == 0 else tf.reshape(values, [-1]),
        default_value=tf.zeros([], values.dtype),
        validate_indices=False,
    )


def index_bytes(count: int, size: int) -> int:
    """The bytes of a row with so many indices."""
    return 2 * count + 4 * _further_segments(size)


def _further_segments(size: int) -> int:
    """Number of segments after the first."""
    return max(0, -(-size // SEGMENT) - 1)
