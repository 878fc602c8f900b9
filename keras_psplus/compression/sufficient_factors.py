"""Gradients of dense layers as the two matrices that they are the product of."""

import math

import tensorflow as tf

from keras_psplus.arguments import number
from keras_psplus.compression import outer_products
from keras_psplus.compression.base import Compressor, DType, Shape
from keras_psplus.compression.cast import Cast


class SufficientFactors(Compressor):
    """Sends what gradients of dense layers are the products of, and multiplies on arrival.

    The gradient of a dense layer's kernel is the product of two matrices with a row for each row
    of the worker's batch (of sequences: for each position). All workers gather the rows of all and
    multiply these, which is the sum of their gradients without any loss. It takes fewer bytes
    than the gradient if the batch has few rows, and more work: each worker multiplies the rows of
    all. What is no such product, or has too many rows, is summed as it is.

    Args:
        dtype: `"bfloat16"` or `"float16"` to send all but vectors in, or None for what it is in.
            Of a product it is the factors that are rounded, and the sum over rows and workers is
            float32.
        min_compression_rate: Gradients whose factors do not save so many times their bytes are
            summed as they are.

    Example:

    >>> factors = keras_psplus.compression.SufficientFactors("bfloat16")
    >>> factors.factor_bytes([1600, 1600], rows=128), factors.wire_bytes([1600, 1600], "float32")
    (819200, 5120000)

    Reference: [Xie et al., 2015](https://arxiv.org/abs/1511.08486) (sufficient factor
    broadcasting); [Zhang et al., 2017](https://arxiv.org/abs/1706.03292) for the choice (Poseidon).
    """

    takes_feedback = False
    accepts_factored = True
    gathers_factors = True
    compresses_vectors = False

    def __init__(self, dtype: DType | None = None, min_compression_rate: float = 1) -> None:
        self.inner = None if dtype is None else Cast(dtype)
        self.dtype = dtype
        self.min_compression_rate = number(
            "min_compression_rate",
            min_compression_rate,
            "a number from 1e-6 up",
            lambda n: n >= 1e-6,
        )

    def factored(self, tensor: tf.Tensor) -> outer_products.OuterProduct | None:
        return outer_products.find_outer_product(tensor)

    def wire_bytes(self, shape: Shape, dtype: DType, step: int | None = None) -> int:
        """Counts the bytes of a gradient that is summed as it is, as `Compressor` says."""
        if self.inner is not None:
            return self.inner.wire_bytes(shape, dtype, step)
        size: int = tf.TensorShape(shape).num_elements() * tf.as_dtype(dtype).size
        return size

    def factor_bytes(self, shape: Shape, rows: int | tf.Tensor) -> int | tf.Tensor:
        """Counts the bytes of the factors of a float32 gradient.

        Args:
            shape: Static shape of the matrix.
            rows: How many rows of the batch there are; an int or an integer tensor.

        Returns:
            An int, or a tensor like `rows`.
        """
        return rows * sum(self._row_bytes(columns) for columns in shape)

    def most_rows(self, shape: Shape, replicas: int) -> int:
        """The most rows of each worker with which factors are sent, as an int.

        Args:
            shape: Static shape of the matrix.
            replicas: Int: how many workers there are.
        """
        # Each sends its factors to all others, where a ring sends two parts in `replicas` of a
        # gradient to as many.
        whole = 2 * self.wire_bytes(shape, tf.float32) / replicas
        most: int = math.floor(whole / (self.factor_bytes(shape, 1) * self.min_compression_rate))
        return most

    def _row_bytes(self, columns: int) -> int:
        # In whole words of four bytes.
        return 4 * columns if self.inner is None else 4 * -(-columns // 2)
