"""Orthonormal columns by operations that GPUs have, where a QR decomposition runs on the host."""

import tensorflow as tf

# A column of which no more than this is left was dependent on those before it.
_NOTHING_LEFT = 1e-5
# Of more columns the operations of a loop over them would cost more than they save.
_MOST_COLUMNS = 32


def gram_schmidt(matrix: tf.Tensor) -> tf.Tensor:
    """Orthonormalizes a matrix of few columns, by Gram and Schmidt's method.

    From each column, what it has of the columns before is taken off twice: once leaves errors of
    rounding, which are large where products are computed in TensorFloat-32.

    Args:
        matrix: Finite float32 matrix of static width.

    Returns:
        Matrix of the same shape, whose columns span those of `matrix`. Zeros stand for columns that
        are dependent on those before them. Of more than 32 columns, it is a QR decomposition.
    """
    columns = matrix.shape[1]
    if columns > _MOST_COLUMNS:
        return tf.linalg.qr(matrix)[0]
    # Squares of small numbers would be zeros.
    scaled = tf.math.divide_no_nan(matrix, tf.reduce_max(tf.abs(matrix), 0, keepdims=True))
    done: list[tf.Tensor] = []
    for column in tf.split(scaled, columns, 1):
        left = column
        if done:
            others = tf.concat(done, 1)
            for _ in range(2):
                left -= tf.matmul(others, tf.matmul(others, left, transpose_a=True))
        # Sums of squares and no products of matrices, for their precision.
        before, after = (tf.sqrt(tf.reduce_sum(tf.square(one))) for one in (column, left))
        length = tf.where(after > _NOTHING_LEFT * before, after, 0.0)
        done.append(tf.math.divide_no_nan(left, length))
    return tf.concat(done, 1)
