"""PowerSGD: matrices as the product of two thin ones.

A step of power iteration on a matrix M of n rows and m columns, with Q of m rows and r columns from
the last step (`exchange`):

    1. P = M Q               all-reduce: mean of P over the workers       n x r numbers
    2. P = orthonormal(P)    on each worker, the same everywhere
    3. Q = transpose(M) P    all-reduce: mean of Q over the workers       m x r numbers
    4. mean of M ~ P transpose(Q)
    5. residual = M - P transpose(Q), which `ErrorFeedback` adds to the next step's M

Q is kept for the next step (`warm_start`), so that the iteration continues from step to step.
"""

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.arguments import flag, number, whole_number
from keras_psplus.compression import outer_products
from keras_psplus.compression.base import Compressor, DType, Payload, Shape, Step
from keras_psplus.compression.cast import saturating_cast
from keras_psplus.compression.options import check_floating, seed_number, size_of
from keras_psplus.native import has_gpus

# No matrix is so large that more would save anything.
_LARGEST_RANK = 2**20
# A column of which no more than this is left was dependent on those before it.
_NOTHING_LEFT = 1e-5
# Of more columns the operations of a loop over them would cost more than they save.
_MOST_COLUMNS = 32


class PowerSGD(Compressor):
    """Low-rank compression of matrices by one step of power iteration (PowerSGD).

    A matrix is sent as two factors of low rank. Tensors of more axes are reshaped to matrices: the
    last axis by all others. Tensors that would not become smaller (vectors, small matrices) are
    sent uncompressed. A number that is not finite, on any worker, makes the whole matrix so on all.

    Args:
        rank: Columns of the two factors, at most 2**20.
        warm_start: Whether the iteration goes on from the last step's factor; otherwise from
            random numbers, the same on all workers.
        min_compression_rate: Matrices whose factors are not smaller by this are sent whole.
        start_step: Before this step gradients are sent whole; they are far from low rank then.
        seed: Of the random numbers.
        error_feedback: Whether strategies send what was left out in later steps.

    Example:

    >>> powersgd = keras_psplus.compression.PowerSGD(rank=4)
    >>> powersgd.wire_bytes([1600, 1600], "float32")
    51200

    Reference: [Vogels et al., 2019](https://arxiv.org/abs/1905.13727).
    """

    reducible = True

    def __init__(
        self,
        rank: int,
        warm_start: bool = True,
        min_compression_rate: float = 2,
        start_step: int = 0,
        seed: int = 0,
        error_feedback: bool = True,
    ) -> None:
        self.rank = whole_number("rank", rank, 1, most=_LARGEST_RANK)
        self.warm_start = flag("warm_start", warm_start)
        self.min_compression_rate = number(
            "min_compression_rate", min_compression_rate, "a number from 0 up", lambda n: n >= 0
        )
        self.start_step = whole_number("start_step", start_step, 0)
        self.seed = seed_number(seed)
        self.error_feedback = flag("error_feedback", error_feedback)

    def init(self, shape: Shape, dtype: DType) -> Any:
        rows, columns, rank = self._layout(shape)
        return {"q": self._random(columns, rank, 0)} if rank and self.warm_start else ()

    def encode(
        self, tensor: tf.Tensor, state: Any, step: Step
    ) -> tuple[tuple[tf.Tensor, ...], Any]:
        rows, columns, rank = self._layout(tensor.shape)
        if not rank:
            return (tensor,), state

        def factors() -> tuple[tf.Tensor, tf.Tensor, Any]:
            matrix = _matrix(tensor, rows, columns)
            p = _orthonormal(tf.matmul(matrix, self._q(state, columns, rank, step)))
            q = outer_products.transposed_times(matrix, p)
            return p, q, self._next(state, q)

        if not self.start_step:
            p, q, state = factors()
            return (p, q), state
        nothing = tf.zeros([0, rank])
        whole, p, q, state = tf.cond(
            tf.cast(step, tf.int64) < self.start_step,
            lambda: (tf.reshape(tensor, [rows * columns]), nothing, nothing, state),
            lambda: (tf.zeros([0], tensor.dtype), *factors()),
        )
        return (whole, p, q), state

    def decode(self, payload: Payload, shape: Shape, dtype: DType, step: Step) -> tf.Tensor:
        if len(payload) == 1:
            return tf.reshape(payload[0], shape)
        *whole, p, q = payload
        if not whole:
            return self._product(p, q, shape, dtype)
        return tf.cond(
            tf.cast(step, tf.int64) < self.start_step,
            lambda: tf.reshape(whole[0], shape),
            lambda: self._product(p, q, shape, dtype),
        )

    def wire_bytes(self, shape: Shape, dtype: DType, step: int | None = None) -> int:
        rows, columns, rank = self._layout(shape)
        if not rank or (step is not None and step < self.start_step):
            element_size: int = tf.as_dtype(dtype).size
            return size_of(shape) * element_size
        return 4 * (rows + columns) * rank

    def factored(self, tensor: tf.Tensor) -> outer_products.OuterProduct | None:
        # Those of others that are derived from this one take tensors.
        takes = type(self).exchange is PowerSGD.exchange and self._layout(tensor.shape)[2]
        return outer_products.find_outer_product(tensor) if takes else None

    def exchange(
        self, tensor: tf.Tensor | outer_products.MatrixPlusOuterProduct, state: Any, step: Step
    ) -> Generator[list[tf.Tensor], list[tf.Tensor], tuple[tf.Tensor, Any, Any]]:
        rows, columns, rank = self._layout(tensor.shape)
        if not rank:
            (mean,) = yield [tensor]
            return mean, tensor, state
        is_sum = isinstance(tensor, outer_products.MatrixPlusOuterProduct)
        matrix = tensor if is_sum else _matrix(tensor, rows, columns)
        q = self._q(state, columns, rank, step)
        (p,) = yield [matrix.times(q) if is_sum else tf.matmul(matrix, q)]
        p = _orthonormal(p)
        q = matrix.transposed_times(p) if is_sum else outer_products.transposed_times(matrix, p)
        (q,) = yield [q]
        mean = self._product(p, q, tensor.shape, tensor.dtype)
        # The mean is also what the paper subtracts in error feedback: over all workers that is the
        # same as subtracting each one's part, and costs no further product (of a sum, one more in
        # the same pass over memory).
        own = outer_products.OuterProduct(tf.transpose(p), tf.transpose(q)) if is_sum else mean
        return mean, own, self._next(state, q)

    def is_finite(self, residual: tf.Tensor, payload: Sequence[tf.Tensor]) -> tf.Tensor:
        # Every factor is spoilt by what is not finite.
        sums = [tf.reduce_sum(tf.cast(part, tf.float32)) for part in payload]
        return tf.math.is_finite(tf.add_n(sums))

    def for_variable(self, path: str, shape: Shape, dtype: DType) -> Compressor | None:
        return super().for_variable(path, shape, dtype) if self._layout(shape)[2] else None

    def _layout(self, shape: Shape) -> tuple[int, int, int]:
        """Rows, columns and rank; rank 0 if the tensor is to be sent whole."""
        shape = tf.TensorShape(shape)
        size = shape.num_elements()
        if shape.rank < 2 or not size:
            return 0, 0, 0
        rows, columns = size // shape[-1], shape[-1]
        rank = min(self.rank, rows, columns)
        worth_it = (rows + columns) * rank * self.min_compression_rate < size
        return rows, columns, rank if worth_it else 0

    def _q(self, state: Any, columns: int, rank: int, step: Step) -> tf.Tensor:
        return state["q"] if self.warm_start else self._random(columns, rank, step)

    def _random(self, columns: int, rank: int, step: Step) -> tf.Tensor:
        seed = tf.stack([tf.constant(self.seed, tf.int64), tf.cast(step, tf.int64)])
        return tf.random.stateless_normal([columns, rank], seed, alg="philox")

    def _next(self, state: Any, q: tf.Tensor) -> Any:
        if not self.warm_start:
            return state
        # A column of zeros (of zero gradients, or of gradients of lower rank) would stay zero for
        # ever, and one that is not finite would spoil all later steps.
        length = tf.norm(q, axis=0)
        return {"q": tf.where(tf.math.is_finite(length) & (length > 0), q, state["q"])}

    def _product(self, p: tf.Tensor, q: tf.Tensor, shape: Shape, dtype: DType) -> tf.Tensor:
        return tf.reshape(saturating_cast(tf.matmul(p, q, transpose_b=True), dtype), shape)


def _matrix(tensor: tf.Tensor, rows: int, columns: int) -> tf.Tensor:
    check_floating(tensor)
    return tf.cast(tf.reshape(tensor, [rows, columns]), tf.float32)


def _orthonormal(p: tf.Tensor) -> tf.Tensor:
    """Orthonormal columns that span those of `p` (and more, if these are dependent)."""
    # Libraries differ in the QR decomposition of NaN.
    finite = tf.reduce_all(tf.math.is_finite(p))
    p = tf.where(finite, p, 0.0)
    orthonormal = gram_schmidt(p) if has_gpus() else tf.linalg.qr(p)[0]
    return tf.where(finite, orthonormal, np.float32(np.nan))


def gram_schmidt(matrix: tf.Tensor) -> tf.Tensor:
    """Orthonormalizes a matrix of few columns, by Gram and Schmidt's method.

    GPUs have all its operations; a QR decomposition runs on the host.

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
