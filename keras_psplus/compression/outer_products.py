"""Gradients that are products of two thin matrices, without making them whole.

The gradient of a dense layer's kernel is the product of what went into the layer, transposed, and
of the gradient of what came out of it (Xie et al., "Distributed Machine Learning via Sufficient
Factor Broadcasting", arXiv:1511.08486). If the batch has few rows, it is less work, and above all
fewer passes over memory, to multiply each of the two by a thin matrix than their product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

# The factors are worth it if the product has at least so many times their elements.
_THIN = 2


class OuterProduct(NamedTuple):
    """The matrix `transpose(left) @ right`.

    Attributes:
        left: float32 tensor of shape `(inner, rows)`.
        right: float32 tensor of shape `(inner, columns)`.
    """

    left: tf.Tensor
    right: tf.Tensor

    def whole(self) -> tf.Tensor:
        return tf.matmul(self.left, self.right, transpose_a=True)


def find_outer_product(tensor: tf.Tensor) -> OuterProduct | None:
    """Finds what the graph multiplies to make a tensor.

    Returns:
        `OuterProduct`, or None if the tensor is no such product, or not of a graph.
    """
    if not tf.is_symbolic_tensor(tensor) or tensor.dtype != tf.float32:
        return None
    op, waits_for = tensor.op, []
    while op.type in ("EnsureShape", "Identity"):
        waits_for += op.control_inputs
        op = op.inputs[0].op
    if op.type != "MatMul" or not op.get_attr("transpose_a") or op.get_attr("transpose_b"):
        return None
    with tf.control_dependencies([*waits_for, *op.control_inputs]):
        return OuterProduct(*map(tf.identity, op.inputs))


class MatrixPlusOuterProduct:
    """Sum of a matrix and a scaled outer product, materialized only where that is cheaper.

    Args:
        matrix: float32 tensor.
        times: Int: how many times it is added.
        shape: Static shape `(rows, columns)` of both.

    Attributes:
        dtype: `tf.float32`.
    """

    dtype = tf.float32

    def __init__(
        self,
        matrix: tf.Tensor,
        product: OuterProduct,
        times: int,
        shape: tf.TensorShape | Sequence[int],
    ) -> None:
        self.shape = rows, columns = tf.TensorShape(shape)
        # The graph may not know the shapes of what comes out of branches.
        left = tf.ensure_shape(product.left, [None, rows])
        right = tf.ensure_shape(product.right, [None, columns])
        left = left if times == 1 else times * left
        most = rows * columns // ((rows + columns) * _THIN)
        if left.shape[0] is None:
            # Shapes are known to the processor, and it is there that branches are chosen.
            with tf.device("CPU:0"):
                inner = tf.shape(left)[0]
                is_thin = inner <= most
                # A sum leaves no rows of the factors, and needs no more branches.
                inner = tf.where(is_thin, inner, 0)
            matrix = tf.cond(
                is_thin,
                lambda: tf.identity(matrix),
                lambda: matrix + OuterProduct(left, right).whole(),
            )
        elif left.shape[0] <= most:
            inner = left.shape[0]
        else:
            inner, matrix = 0, matrix + OuterProduct(left, right).whole()
        self._matrix, self._left, self._right = matrix, left[:inner], right[:inner]

    def times(self, thin: tf.Tensor) -> tf.Tensor:
        """Multiplies by a matrix of few columns."""
        of_product = tf.matmul(self._left, tf.matmul(self._right, thin), transpose_a=True)
        return tf.matmul(self._matrix, thin) + of_product

    def transposed_times(self, thin: tf.Tensor) -> tf.Tensor:
        of_product = tf.matmul(self._right, tf.matmul(self._left, thin), transpose_a=True)
        return transposed_times(self._matrix, thin) + of_product

    def minus(self, product: OuterProduct, whole: tf.Tensor) -> tf.Tensor:
        """Takes off an `OuterProduct`, `whole` as a tensor; returns a float32 tensor."""

        def from_factors() -> tf.Tensor:
            # Neither operand is materialized.
            left = tf.concat([self._left, -product.left], 0)
            return (
                self._matrix
                + OuterProduct(left, tf.concat([self._right, product.right], 0)).whole()
            )

        if self._left.shape[0] is None:
            return tf.cond(tf.shape(self._left)[0] > 0, from_factors, lambda: self._matrix - whole)
        return from_factors() if self._left.shape[0] else self._matrix - whole


def transposed_times(matrix: tf.Tensor, thin: tf.Tensor) -> tf.Tensor:
    # A matrix product that transposes what is large takes five times as long on processors.
    return tf.transpose(tf.matmul(thin, matrix, transpose_a=True))
