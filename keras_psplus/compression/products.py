"""Gradients that are products of two thin matrices, without making them whole.

The gradient of a dense layer's kernel is the product of what went into the layer, transposed, and
of the gradient of what came out of it (Xie et al., "Distributed Machine Learning via Sufficient
Factor Broadcasting", arXiv:1511.08486). If the batch has few rows, it is less work, and above all
fewer passes over memory, to multiply each of the two by a thin matrix than their product.
"""

from typing import NamedTuple

import tensorflow as tf

# The factors are worth it if they have at most one in so many of the product's elements.
_THIN = 2


class Product(NamedTuple):
    """The matrix `transpose(left) @ right`.

    Attributes:
        left: float32 tensor of shape `(inner, rows)`.
        right: float32 tensor of shape `(inner, columns)`.
    """

    left: tf.Tensor
    right: tf.Tensor

    def whole(self):
        """The matrix itself."""
        return tf.matmul(self.left, self.right, transpose_a=True)


def factors(tensor):
    """Finds what the graph multiplies to make a tensor.

    Args:
        tensor: Tensor.

    Returns:
        `Product`; None if the tensor is none, or if there is no graph.
    """
    if not tf.is_symbolic_tensor(tensor) or tensor.dtype != tf.float32:
        return None
    op = tensor.op
    while op.type in ("EnsureShape", "Identity"):
        op = op.inputs[0].op
    if op.type != "MatMul" or not op.get_attr("transpose_a") or op.get_attr("transpose_b"):
        return None
    return Product(*op.inputs)


class Sum:
    """A matrix and some times a product, which are added up only if this is less work.

    Args:
        matrix: float32 tensor of static shape `(rows, columns)`.
        product: `Product` of the same shape.
        times: Int: how many times it is added.

    Attributes:
        shape: Static shape.
        dtype: `tf.float32`.
    """

    dtype = tf.float32

    def __init__(self, matrix, product, times):
        self.shape = rows, columns = matrix.shape
        # The graph may not know the shapes of what comes out of branches.
        left = tf.ensure_shape(times * product.left, [None, rows])
        right = tf.ensure_shape(product.right, [None, columns])
        if left.shape[0] is None:
            inner = tf.shape(left)[0]
            is_thin = _is_thin(tf.cast(inner, tf.int64), rows, columns)
            matrix = tf.cond(
                is_thin,
                lambda: tf.identity(matrix),
                lambda: matrix + Product(left, right).whole(),
            )
            # Without another branch: what has been added up leaves no rows of the factors.
            inner = tf.where(is_thin, inner, 0)
        elif _is_thin(left.shape[0], rows, columns):
            inner = left.shape[0]
        else:
            inner, matrix = 0, matrix + Product(left, right).whole()
        self._matrix, self._left, self._right = matrix, left[:inner], right[:inner]

    def times(self, thin):
        """Multiplies by a matrix of few columns."""
        of_product = tf.matmul(self._left, tf.matmul(self._right, thin), transpose_a=True)
        return tf.matmul(self._matrix, thin) + of_product

    def transposed_times(self, thin):
        """Multiplies the transposed sum by a matrix of few columns."""
        of_product = tf.matmul(self._right, tf.matmul(self._left, thin), transpose_a=True)
        return transposed_times(self._matrix, thin) + of_product

    def minus(self, product, whole):
        """Takes off a `Product`, `whole` as a tensor; returns a float32 tensor."""

        def from_factors():
            # Neither what is added nor what is taken off is ever in memory by itself.
            left = tf.concat([self._left, -product.left], 0)
            return self._matrix + Product(left, tf.concat([self._right, product.right], 0)).whole()

        if self._left.shape[0] is None:
            return tf.cond(tf.shape(self._left)[0] > 0, from_factors, lambda: self._matrix - whole)
        return from_factors() if self._left.shape[0] else self._matrix - whole


def transposed_times(matrix, thin):
    """Multiplies a matrix, transposed, by one of few columns."""
    # A matrix product that transposes what is large takes five times as long on processors.
    return tf.transpose(tf.matmul(thin, matrix, transpose_a=True))


def _is_thin(inner, rows, columns):
    return inner * (rows + columns) * _THIN <= rows * columns
