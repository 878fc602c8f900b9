"""Size classes of rows that are gathered."""

from __future__ import annotations

import tensorflow as tf

# Rows are padded to one of these counts (eight in each octave, at most 12.5 % of waste), so that
# gathers of ever-changing sizes need a fixed number of keys.
COUNT = 256
_SIZES = sorted({n << k >> 3 for k in range(31) for n in range(8, 16)} - {0})[:COUNT]


def padded_size(size: int | tf.Tensor) -> tf.Tensor:
    """The number of elements that `gather_rows` sends for so many."""
    return of(size)[0]


def of(rows: int | tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Rounds a number of rows up to a size class.

    Returns `(rounded rows, index of the class)`.
    """
    # On the host, that has the rows' number and needs the class's: no GPU is asked in between.
    with tf.device("CPU:0"):
        sizes = tf.constant(_SIZES, tf.int32)
        index = tf.searchsorted(sizes, tf.reshape(tf.maximum(rows, 1), [1]))[0]
        return sizes[index], index


def padded_rows(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Pads a tensor of unknown leading dimensions to a size class.

    Returns `(matrix of rows of static shape, number of rows, index of the class)`.
    """
    dimensions = tensor.shape.as_list()
    leading = 1 + max(i for i, size in enumerate(dimensions) if size is None)
    flat = tf.reshape(tensor, [-1, *dimensions[leading:]])
    rows = tf.shape(flat)[0]
    padded, index = of(rows)
    flat = tf.pad(flat, [[0, padded - rows], *[[0, 0]] * len(dimensions[leading:])])
    return tf.ensure_shape(flat, [None, *dimensions[leading:]]), rows, index


def without_padding(padded: tf.Tensor, rows: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """The inverse of `padded_rows`, for a tensor of the shape of `like`."""
    return tf.ensure_shape(tf.reshape(padded[:rows], tf.shape(like)), like.shape)
