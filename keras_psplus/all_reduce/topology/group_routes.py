"""Routes of uncompressed tensors inside a group, in two halves.

TensorFlow has no reduce-scatter on CPUs: rows are exchanged, and each replica sums its row. With
replicas r0, r1 and r2 of a group, whose matrices have the rows a, b and c:

              scatter: exchange           sum              gather
    r0        a0 a1 a2 -> a0 b0 c0 ->  s0 = a0+b0+c0  ->  s0 s1 s2
    r1        b0 b1 b2 -> a1 b1 c1 ->  s1 = a1+b1+c1  ->  s0 s1 s2
    r2        c0 c1 c2 -> a2 b2 c2 ->  s2 = a2+b2+c2  ->  s0 s1 s2

Between the two halves, `s0` to `s2` are summed with the other groups' (see `two_levels`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from keras_psplus import compression

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher


def scatter(launcher: Launcher, rows: tf.Tensor) -> tf.Tensor:
    """Reduce-scatter: sums a matrix with one row per replica; each receives its row.

    Args:
        launcher: `operations.Launcher` of this replica in its group.
        rows: Matrix of static shape.

    Returns:
        Matrix of one row, of the same dtype.
    """
    size = rows.shape[0]
    received = _exchanged(launcher, rows, size)
    # As in a ring, the sum of what takes two bytes has more on its way.
    wide = tf.float32 if rows.dtype.is_floating and rows.dtype.size == 2 else rows.dtype
    total = tf.add_n(tf.unstack(tf.cast(received, wide), size))
    return tf.cast(total, rows.dtype)[tf.newaxis]


def _exchanged(launcher: Launcher, rows: tf.Tensor, size: int) -> tf.Tensor:
    if rows.dtype == tf.float32:
        return launcher.all_to_all(rows)
    words = launcher.all_to_all(compression.pack((rows,), size))
    return compression.unpack(words, (rows,), size)[0]


def gather(launcher: Launcher, row: tf.Tensor, size: int) -> tf.Tensor:
    """All replicas' rows, in the order of their places.

    Args:
        launcher: `operations.Launcher` of this replica in its group.
        row: Matrix of one row, of static shape.
        size: Number of replicas in the group.

    Returns:
        Matrix of one row for each replica.
    """
    if row.dtype == tf.float32:
        return launcher.gather(row)
    words = launcher.gather(compression.pack((row,), 1))
    like = tf.zeros([size, row.shape[1]], row.dtype)
    return compression.unpack(words, (like,), size)[0]
