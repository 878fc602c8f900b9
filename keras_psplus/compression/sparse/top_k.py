"""Finds the largest elements without sorting all."""

import functools
import math

import numpy as np
import tensorflow as tf

from keras_psplus.compression.sparse.bisection import find_largest
from keras_psplus.compression.sparse.indices import scatter_rows
from keras_psplus.native.devices import has_gpus

# A sample of this many magnitudes finds a threshold; smaller tensors are sorted as they are.
_SAMPLE = 1 << 14
# Bits that one pass of a bisection finds: of many elements, the passes are more and smaller.
_DIGIT_OF_FEW, _DIGIT_OF_MANY = 4, 1
# Eight of them, in a byte each.
_ALL_TRUE = 0x0101010101010101


def top_k(matrix: tf.Tensor, count: int | tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Selects the `count` elements of largest magnitude per row, in index order.

    Sorting a large tensor is slow. A threshold that is estimated from a sample leaves few more than
    `count` elements; if at least `count` are left, all of the largest are among them.

    Args:
        matrix: float32 tensor of shape `(rows, size)`. What is not finite counts as the largest.
        count: Int, or a scalar tensor.

    Returns:
        float32 tensor of the elements and int32 tensor (on GPUs, int64) of their indices, ascending
        in each row, of shape `(rows, count)`.
    """
    rows, size = matrix.shape
    if rows != 1 or not isinstance(count, int) or size < 4 * _SAMPLE:
        return _by_sorting(matrix, count)
    of_all = _by_bisection if has_gpus() else _by_sorting
    if count > size // 8:
        return of_all(matrix, count)
    row = matrix[0]
    # Odd, so as not to fall in with the columns of a matrix.
    sample = _magnitudes(row[:: size // _SAMPLE | 1])
    expected = count * sample.shape[0] / size
    rank = min(sample.shape[0], math.ceil(expected + 3 * math.sqrt(expected) + 1))
    threshold = tf.math.top_k(sample, rank).values[-1]
    # NaN, which compares with nothing, is not among the small.
    candidates = _indices_of_false(tf.abs(row) <= threshold)

    def bisect_candidates() -> tuple[tf.Tensor, tf.Tensor]:
        values = tf.gather(row, candidates)
        chosen = find_largest(_magnitudes(values), count, _DIGIT_OF_FEW)
        return tf.gather(values, chosen)[tf.newaxis], tf.gather(candidates, chosen)[tf.newaxis]

    def select_candidates() -> tuple[tf.Tensor, tf.Tensor]:
        found = tf.cast(candidates, tf.int32)
        values = tf.gather(row, found)
        left = _magnitudes(values)
        # Comparisons with the last one that is wanted leave indices in order; and to find that one
        # is less work than a sort.
        last = tf.raw_ops.NthElement(input=left, n=count - 1, reverse=True)
        chosen = tf.where(left >= last)[:, 0]
        if_equal = functools.partial(_first_of_equal, left, last, count)
        chosen = tf.cond(tf.size(chosen) == count, lambda: chosen, if_equal)
        return tf.gather(values, chosen)[tf.newaxis], tf.gather(found, chosen)[tf.newaxis]

    # See `bisection`.
    of_candidates = bisect_candidates if has_gpus() else select_candidates
    found = tf.cond(tf.size(candidates) >= count, of_candidates, lambda: of_all(matrix, count))
    return tuple(tf.reshape(part, [1, count]) for part in found)


def _first_of_equal(values: tf.Tensor, last: tf.Tensor, count: int) -> tf.Tensor:
    """Indices of `count` values above `last`, filled up with the first equal to it."""
    above, equal = values > last, values == last
    wanted = count - tf.math.count_nonzero(above, dtype=tf.int32)
    return tf.where(above | (equal & (tf.cumsum(tf.cast(equal, tf.int32)) <= wanted)))[:, 0]


def _indices_of_false(mask: tf.Tensor) -> tf.Tensor:
    """Indices of the few elements that are false.

    `tf.where` is slow for each element, true or not, so eight are tested at a time.
    """
    # Not as `tf.where(~mask)`: TensorFlow makes `x > y` of `~(x <= y)`, which NaN is not either.
    size = mask.shape[0]
    whole = size - size % 8
    same = tf.cast(mask, tf.uint8)
    words = tf.bitcast(tf.reshape(same[:whole], [whole // 8, 8]), tf.int64)
    some = tf.where(words != _ALL_TRUE)[:, 0]
    eights = tf.bitcast(tf.bitwise.bitwise_xor(tf.gather(words, some), _ALL_TRUE), tf.uint8)
    found = tf.where(eights)
    indices = tf.gather(some, found[:, 0]) * 8 + found[:, 1]
    if whole == size:
        return indices
    return tf.concat([indices, whole + tf.where(same[whole:] == 0)[:, 0]], 0)


def _by_sorting(matrix: tf.Tensor, count: int | tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    indices = tf.math.top_k(_magnitudes(matrix), count, sorted=False).indices
    # What a sort leaves is in no order of indices; to mark them is less work than another sort.
    marks = scatter_rows(tf.constant(True), indices, matrix.shape[1])
    found = tf.where(tf.reshape(marks, tf.shape(matrix)))[:, 1]
    indices = tf.reshape(found if has_gpus() else tf.cast(found, tf.int32), tf.shape(indices))
    return tf.gather(matrix, indices, batch_dims=1), indices


def _by_bisection(matrix: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor]:
    chosen = find_largest(_magnitudes(matrix[0]), count, _DIGIT_OF_MANY)
    return tf.gather(matrix[0], chosen)[tf.newaxis], chosen[tf.newaxis]


def _magnitudes(values: tf.Tensor) -> tf.Tensor:
    values = tf.abs(values)
    return tf.where(tf.math.is_finite(values), values, np.float32(np.inf))
