"""Finds the largest elements without sorting all."""

import math

import tensorflow as tf

# A sample of this many magnitudes finds a threshold; smaller tensors are sorted as they are.
_SAMPLE = 1 << 14


def places_of_largest(magnitudes, count):
    """Finds the places of the `count` largest of each row, in any order.

    Sorting a large tensor is slow. A threshold that is taken from a sample leaves few more than
    `count` elements; all of the largest are among them if they are `count` at least.

    Args:
        magnitudes: Tensor of shape `(rows, size)` without NaN.
        count: Int, or a scalar tensor.

    Returns:
        int32 tensor of shape `(rows, count)`.
    """
    rows, size = magnitudes.shape
    if rows != 1 or not isinstance(count, int) or size < 4 * _SAMPLE or count > size // 8:
        return tf.math.top_k(magnitudes, count, sorted=False).indices
    # Odd, so as not to fall in with the columns of a matrix.
    sample = magnitudes[0, :: size // _SAMPLE | 1]
    expected = count * sample.shape[0] / size
    rank = min(sample.shape[0], math.ceil(expected + 3 * math.sqrt(expected) + 1))
    threshold = tf.math.top_k(sample, rank).values[-1]
    candidates = tf.cast(tf.where(magnitudes[0] > threshold)[:, 0], tf.int32)

    def of_candidates():
        best = tf.math.top_k(tf.gather(magnitudes[0], candidates), count, sorted=False)
        return tf.gather(candidates, best.indices)

    def of_all():
        return tf.math.top_k(magnitudes[0], count, sorted=False).indices

    places = tf.cond(tf.size(candidates) >= count, of_candidates, of_all)
    return tf.reshape(places, [1, count])
