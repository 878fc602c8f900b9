"""Finds the largest numbers without sorting, by operations that GPUs have.

TensorFlow sorts a row on one of a GPU's multiprocessors, and has no kernel of `NthElement` there.
"""

import numpy as np
import tensorflow as tf

from keras_psplus.compression.sparse.indices import scatter_rows

_BITS = 32


def find_largest(magnitudes: tf.Tensor, count: int, digit: int) -> tf.Tensor:
    """Finds the `count` largest numbers of a vector; of equal ones, the first.

    Args:
        magnitudes: float32 vector of at least `count` numbers, none of which is negative or NaN.
        count: How many are wanted.
        digit: As for `nth_largest`.

    Returns:
        int64 vector of their indices, ascending.
    """
    bits = ordered_bits(magnitudes)
    last = nth_largest(bits, count, digit)
    chosen = tf.where(bits >= last)[:, 0]

    def first_of_equal() -> tf.Tensor:
        above, equal = (tf.where(mask)[:, 0] for mask in (bits > last, bits == last))
        mixed = tf.concat([above, equal[: count - tf.size(above)]], 0)
        marks = scatter_rows(tf.constant(True), mixed[tf.newaxis], tf.size(bits, tf.int64))
        return tf.where(marks)[:, 0]

    chosen = tf.cond(tf.size(chosen) == count, lambda: chosen, first_of_equal)
    return tf.ensure_shape(chosen, [count])


def ordered_bits(magnitudes: tf.Tensor) -> tf.Tensor:
    """Bits of float32 numbers that are not negative, as int64 numbers of the same order."""
    return tf.cast(tf.bitcast(magnitudes, tf.int32), tf.int64)


def nth_largest(numbers: tf.Tensor, n: int, digit: int) -> tf.Tensor:
    """Finds the n-th largest number, digit by digit from the first.

    Args:
        numbers: int64 vector of numbers from 0 to 2**31 - 1, at least `n` of them.
        n: How many are wanted.
        digit: Bits, 1, 2 or 4, that one pass finds: with all of these bits' values but zero each
            number is compared at once, which takes memory.

    Returns:
        int64 scalar.
    """
    places = tf.constant(1 << np.arange(_BITS - digit, -1, -digit), tf.int64)
    digits = tf.range(1, 1 << digit, dtype=tf.int64)

    def next_digit(i: tf.Tensor, found: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        place = tf.gather(places, i)
        as_large = numbers[:, tf.newaxis] >= found + digits * place
        counts = tf.reduce_sum(tf.cast(as_large, tf.int64), 0)
        return i + 1, found + place * tf.reduce_sum(tf.cast(counts >= n, tf.int64))

    passes = _BITS // digit
    start = tf.constant(0), tf.zeros([], tf.int64)
    result: tf.Tensor = tf.while_loop(
        lambda i, _: i < passes, next_digit, start, maximum_iterations=passes
    )[1]
    return result
