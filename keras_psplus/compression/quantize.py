"""Few bits for each element, and a scale for each block of elements."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from keras_psplus.arguments import flag, whole_number
from keras_psplus.compression.base import DType, Payload, Shape, Step
from keras_psplus.compression.options import seed_number
from keras_psplus.compression.rows import RowCompressor, rows_and_size
from keras_psplus.native import has_gpus

# Below this, a block's scale or its inverse would leave float32's normal range.
_TINY = 1.5e-36
# Kernels count in 32 bits.
_LARGEST_BLOCK = 2**30


class Int8(RowCompressor):
    """Sends signed bytes, scaled in each block by its largest magnitude.

    A block that holds a number that is not finite arrives as NaN. Blocks of magnitudes below
    1.5e-36 arrive as zeros. Strategies send vectors, such as biases, whole.

    Args:
        block_size: Elements that share a scale, at most 2**30.
        stochastic: Round up or down at random, such that the mean is right (QSGD). Otherwise
            numbers are rounded to the nearest.
        seed: Of the random rounding. It depends on the step and on the data as well, so that
            workers and variables round independently of each other.
        error_feedback: Whether strategies make up for the loss in later steps. By default, where
            rounding is not stochastic.

    Example:

    >>> int8 = keras_psplus.compression.Int8()
    >>> payload, _ = int8.encode(tf.constant([-1.0, 0.5]), (), step=0)
    >>> payload[0]
    <tf.Tensor: shape=(1, 2), dtype=int8, numpy=array([[-127,   64]], dtype=int8)>

    Reference: [Alistarh et al., 2016](https://arxiv.org/abs/1610.02132) (QSGD),
    [Dettmers, 2015](https://arxiv.org/abs/1511.04561).
    """

    supports_values = True
    compresses_vectors = False

    def __init__(
        self,
        block_size: int = 256,
        stochastic: bool = False,
        seed: int = 0,
        error_feedback: bool | None = None,
    ) -> None:
        self.block_size = self.row_multiple = whole_number(
            "block_size", block_size, 1, most=_LARGEST_BLOCK
        )
        self.stochastic = flag("stochastic", stochastic)
        self.seed = seed_number(seed)
        self.error_feedback = flag("error_feedback", error_feedback, default=not self.stochastic)

    def encode_rows(self, values: tf.Tensor, step: Step) -> Payload:
        rows, size = rows_and_size(values)
        blocks = _blocks(values, self._block(size))
        # Passes over memory are what this costs: magnitudes would be one more, and so would a sum
        # of anything but what is rounded (in place) anyway.
        largest = tf.maximum(
            tf.reduce_max(blocks, -1, keepdims=True), -tf.reduce_min(blocks, -1, keepdims=True)
        )
        scaled = blocks * tf.where(largest > _TINY, 127.0 / largest, 0.0)
        # Graphs make a product of a division, which may differ in the last bit.
        scales = largest * np.float32(1 / 127)
        if self.stochastic:
            salt = tf.cast(tf.bitcast(tf.reduce_sum(scales), tf.int32), tf.int64)
            seed = tf.stack([salt + self.seed, tf.cast(step, tf.int64)])
            noise = tf.random.stateless_uniform(tf.shape(scaled), seed, alg="philox")
            rounded = tf.floor(scaled + noise)
        else:
            rounded = tf.round(scaled)
        # Kernels differ in whether a maximum sees NaN; a sum always does.
        visible = tf.math.is_finite(tf.reduce_sum(rounded, -1, keepdims=True))
        scales = tf.where(visible, scales, np.float32(np.nan))
        quantized = _unblock(tf.cast(rounded, tf.int8), rows, size)
        return quantized, tf.reshape(scales, [rows, blocks.shape[1]])

    def decode_rows(
        self, payload: Payload, row_shape: Shape, dtype: DType, step: Step
    ) -> tf.Tensor:
        quantized, scales = payload
        rows, size = rows_and_size(quantized)
        blocks = _blocks(quantized, self._block(size)) * scales[..., tf.newaxis]
        return tf.reshape(tf.cast(_unblock(blocks, rows, size), dtype), [rows, *row_shape])

    def is_finite(self, residual: tf.Tensor, payload: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.math.is_finite(tf.reduce_sum(payload[1]))

    def row_bytes(self, row_shape: Shape, dtype: DType, step: int | None = None) -> int:
        size: int = tf.TensorShape(row_shape).num_elements()
        return size + 4 * -(-size // self._block(size))

    def _block(self, size: int) -> int:
        return max(1, min(self.block_size, size))


class Sign(RowCompressor):
    """Sends signs, and the mean magnitude of each block.

    A block that holds a number that is not finite arrives as non-finite numbers. Zeros count as
    positive. Strategies send vectors, such as biases, whole.

    Args:
        block_size: Elements that share a scale; a multiple of 32, at most 2**30.
        error_feedback: Whether strategies make up for the loss in later steps. Without it, signs
            do not converge in general. Rows of embeddings, where that is not possible, are sent
            whole.

    Example:

    >>> sign = keras_psplus.compression.Sign()
    >>> payload, _ = sign.encode(tf.constant([1.0, -3.0]), (), step=0)
    >>> sign.decode(payload, [2], tf.float32, step=0)
    <tf.Tensor: shape=(2,), dtype=float32, numpy=array([ 2., -2.], dtype=float32)>

    Reference: [Karimireddy et al., 2019](https://arxiv.org/abs/1901.09847) (EF-SignSGD);
    1-bit SGD, Seide et al., Interspeech 2014.
    """

    compresses_vectors = False

    def __init__(self, block_size: int = 1024, error_feedback: bool = True) -> None:
        self.block_size = self.row_multiple = whole_number(
            "block_size", block_size, 32, 32, most=_LARGEST_BLOCK
        )
        self.error_feedback = flag("error_feedback", error_feedback)
        self.compresses_rows = not self.error_feedback

    def encode_rows(self, values: tf.Tensor, step: Step) -> Payload:
        rows, size = rows_and_size(values)
        blocks = _blocks(values, self._block(size))
        # The last block is padded with zeros, which must not count in its mean.
        filled = np.minimum(
            self._block(size), size - self._block(size) * np.arange(blocks.shape[1])
        )
        scales = tf.reduce_sum(tf.abs(blocks), -1) / tf.constant(filled, tf.float32)
        # Sixteen bits times their powers of two are exact in float32, and there is a fast kernel
        # for it everywhere, as there is none for sums of integers.
        halves = blocks.shape[1] * self._block(size) // 16
        bits = tf.reshape(tf.cast(blocks >= 0, tf.float32), [rows * halves, 16])
        numbers = tf.cast(
            tf.matmul(bits, tf.constant(2.0 ** np.arange(16)[:, None], tf.float32)), tf.uint16
        )
        # GPUs would take slices of int32 in the host's memory.
        word = tf.float32 if has_gpus() else tf.int32
        words = tf.bitcast(tf.reshape(numbers, [rows, halves // 2, 2]), word)
        return words[:, : -(-size // 32)], scales

    def decode_rows(
        self, payload: Payload, row_shape: Shape, dtype: DType, step: Step
    ) -> tf.Tensor:
        words, scales = payload
        size = tf.TensorShape(row_shape).num_elements()
        rows, _ = rows_and_size(words)
        words = _padded(words, scales.shape[1] * self._block(size) // 32)
        signs = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, 1.0, -1.0)
        signs = tf.gather(
            tf.constant(signs, tf.float32), tf.cast(tf.bitcast(words, tf.uint8), tf.int32)
        )
        blocks = tf.reshape(signs, [rows, scales.shape[1], self._block(size)])
        blocks *= scales[..., tf.newaxis]
        return tf.reshape(tf.cast(_unblock(blocks, rows, size), dtype), [rows, *row_shape])

    def is_finite(self, residual: tf.Tensor, payload: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.math.is_finite(tf.reduce_sum(payload[1]))

    def row_bytes(self, row_shape: Shape, dtype: DType, step: int | None = None) -> int:
        size: int = tf.TensorShape(row_shape).num_elements()
        return 4 * -(-size // 32) + 4 * -(-size // self._block(size))

    def _block(self, size: int) -> int:
        return max(32, min(self.block_size, -(-size // 32) * 32))


def _blocks(values: tf.Tensor, block: int) -> tf.Tensor:
    """Cuts rows into blocks, the last padded with zeros: `(rows, blocks, block)` in float32."""
    rows, size = rows_and_size(values)
    count = -(-size // block)
    matrix = _padded(tf.reshape(values, [rows, size]), count * block)
    return tf.reshape(tf.cast(matrix, tf.float32), [rows, count, block])


def _unblock(blocks: tf.Tensor, rows: int | tf.Tensor, size: int) -> tf.Tensor:
    """The inverse of `_blocks`."""
    padded = blocks.shape[1] * blocks.shape[2]
    matrix = tf.reshape(blocks, [rows, padded])
    return matrix if padded == size else matrix[:, :size]


def _padded(matrix: tf.Tensor, size: int) -> tf.Tensor:
    missing = size - matrix.shape[1]
    return tf.pad(matrix, [[0, 0], [0, missing]]) if missing else matrix
