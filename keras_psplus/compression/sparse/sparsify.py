"""A few elements of each tensor."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.arguments import flag, number, whole_number
from keras_psplus.compression.base import DType, Payload, Shape, Step
from keras_psplus.compression.cast import saturating_cast
from keras_psplus.compression.options import seed_number
from keras_psplus.compression.rows import RowCompressor, rows_and_size
from keras_psplus.compression.sparse.indices import (
    decode_indices_u16,
    encode_indices_u16,
    index_bytes,
    scatter_rows,
)
from keras_psplus.compression.sparse.top_k import top_k
from keras_psplus.native.devices import has_gpus


class TopK(RowCompressor):
    """Sends the largest elements and their indices (Deep Gradient Compression).

    A float32 number and its index take six bytes, as in the paper. Numbers that are not finite
    count as the largest. Strategies send vectors, such as biases, whole.

    Args:
        density: Part of the elements that is sent, in (0, 1]; at least one element is.
        warmup_epochs: Over so many epochs, at most 10,000, the density falls exponentially to
            `density`; the shapes of the payload are unknown to the graph then.
        steps_per_epoch: Steps of such an epoch; needed with `warmup_epochs`.
        momentum_correction: Momentum that error feedback accumulates before compression. The
            optimizer should have none then. See `ErrorFeedback`.
        factor_masking: Whether that momentum is forgotten where elements were sent.
        error_feedback: Whether strategies send what was left out in later steps. Rows of
            embeddings, where that is not possible, are then sent whole.

    Example:

    >>> topk = keras_psplus.compression.TopK(0.5)
    >>> payload, _ = topk.encode(tf.constant([1.0, -3.0, 0.5, 2.0]), (), step=0)
    >>> topk.decode(payload, [4], tf.float32, step=0)
    <tf.Tensor: shape=(4,), dtype=float32, numpy=array([ 0., -3.,  0.,  2.], dtype=float32)>

    Reference: [Lin et al., 2017](https://arxiv.org/abs/1712.01887).
    """

    supports_reduce_scatter = False
    has_sum_decode = True
    compresses_vectors = False

    def __init__(
        self,
        density: float,
        warmup_epochs: int = 0,
        steps_per_epoch: int | None = None,
        momentum_correction: float = 0.0,
        factor_masking: bool = True,
        error_feedback: bool = True,
    ) -> None:
        self.density = _checked_density(density)
        self.warmup_epochs = whole_number("warmup_epochs", warmup_epochs, 0, most=10_000)
        if self.warmup_epochs:
            steps_per_epoch = whole_number("steps_per_epoch", steps_per_epoch, 1)
        self.steps_per_epoch = steps_per_epoch
        self.momentum_correction = number(
            "momentum_correction", momentum_correction, "in [0, 1)", lambda m: 0 <= m < 1
        )
        self.factor_masking = flag("factor_masking", factor_masking)
        self.error_feedback = flag("error_feedback", error_feedback)
        self.compresses_rows = not self.error_feedback

    @property
    def feedback_options(self) -> dict[str, Any]:  # type: ignore[override]
        if not self.momentum_correction:
            return {}
        return {"momentum": self.momentum_correction, "factor_masking": self.factor_masking}

    def encode_rows(self, values: tf.Tensor, step: Step) -> Payload:
        rows, size = rows_and_size(values)
        matrix = tf.reshape(values, [rows, size])
        found, indices = top_k(tf.cast(matrix, tf.float32), self._count_at(size, step))
        return tf.cast(found, values.dtype), *encode_indices_u16(indices, size)

    def decode_rows(
        self, payload: Payload, row_shape: Shape, dtype: DType, step: Step
    ) -> tf.Tensor:
        values, *indices = payload
        return tf.cast(_scatter(values, decode_indices_u16(*indices), row_shape), dtype)

    def is_finite(self, residual: tf.Tensor, payload: Sequence[tf.Tensor]) -> tf.Tensor:
        # The largest are sent, and that is what is not finite.
        return tf.math.is_finite(tf.reduce_sum(tf.cast(payload[0], tf.float32)))

    def add_rows(self, payload: Payload, row_shape: Shape, step: Step) -> tf.Tensor:
        values, indices = payload[0], decode_indices_u16(*payload[1:])
        size = tf.TensorShape(row_shape).num_elements()
        if has_gpus():
            # There the order of additions to one element is not always the same.
            total = tf.add_n([_scatter(v, p, row_shape) for v, p in _rows_of(values, indices)])
        else:
            values = tf.cast(tf.reshape(values, [-1]), tf.float32)
            total = tf.math.unsorted_segment_sum(values, tf.reshape(indices, [-1]), size)
        return tf.reshape(total, row_shape)

    def row_bytes(self, row_shape: Shape, dtype: DType, step: int | None = None) -> int:
        size = tf.TensorShape(row_shape).num_elements()
        stage = self.warmup_epochs
        if step is not None and stage:
            assert self.steps_per_epoch is not None
            stage = min(stage, step // self.steps_per_epoch)
        count = self._counts(size)[stage]
        value_size: int = tf.as_dtype(dtype).size
        return count * value_size + index_bytes(count, size)

    def count(self, size: int) -> int:
        """Counts the elements that are sent after the warm-up.

        Args:
            size: Int: how many elements there are.

        Returns:
            An int; at least 1, if there are any.
        """
        return self._counts(size)[-1]

    def _counts(self, size: int) -> list[int]:
        """Numbers of elements sent in each epoch of the warm-up, and after it."""
        epochs = range(1, self.warmup_epochs + 2)
        return [_count(self.density ** (e / (self.warmup_epochs + 1)), size) for e in epochs]

    def _count_at(self, size: int, step: Step) -> int | tf.Tensor:
        counts = self._counts(size)
        if not self.warmup_epochs:
            return counts[0]
        stage = tf.cast(step, tf.int64) // self.steps_per_epoch
        return tf.gather(tf.constant(counts), tf.minimum(stage, self.warmup_epochs))


class RandomK(RowCompressor):
    """Sends elements at random indices, the same on all workers at a step.

    Each of `density * size` segments of equal length gives one element, drawn again at each step
    from a seed that all workers share; so only values are sent, and they can be all-reduced. If a
    number is not finite anywhere in the tensor, all that is sent is NaN.

    Args:
        density: Part of the elements that is sent, in (0, 1]; at least one element is.
        unbiased: Multiply what is sent by the length of its segment, such that the mean over steps
            is right. Not together with error feedback, with which this diverges.
        seed: Of the indices.
        error_feedback: Whether strategies send what was left out in later steps. By default,
            unless `unbiased`. Rows of embeddings, where that is not possible, are then sent whole.

    Raises:
        ValueError: If both `unbiased` and `error_feedback` are set, or an argument does not fit.

    Example:

    >>> randomk = keras_psplus.compression.RandomK(0.25)
    >>> payload, _ = randomk.encode(tf.range(8.0), (), step=0)
    >>> payload[0].shape
    TensorShape([1, 2])

    Reference: [Stich et al., 2018](https://arxiv.org/abs/1809.07599),
    [Konečný et al., 2016](https://arxiv.org/abs/1610.05492) (random masks from a seed).
    """

    reducible = True
    is_linear = True
    compresses_vectors = False

    def __init__(
        self,
        density: float,
        unbiased: bool = False,
        seed: int = 0,
        error_feedback: bool | None = None,
    ) -> None:
        self.density = _checked_density(density)
        self.unbiased = flag("unbiased", unbiased)
        self.takes_feedback = not self.unbiased
        self.seed = seed_number(seed)
        self.error_feedback = flag("error_feedback", error_feedback, default=self.takes_feedback)
        if self.error_feedback and not self.takes_feedback:
            raise ValueError(
                "`unbiased` scaling diverges with error feedback; choose one. "
                f"Received: unbiased={unbiased!r}, error_feedback={error_feedback!r}"
            )
        self.compresses_rows = not self.error_feedback

    def encode_rows(self, values: tf.Tensor, step: Step) -> Payload:
        rows, size = rows_and_size(values)
        matrix = tf.reshape(values, [rows, size])
        indices, _ = self._indices(size, step)
        finite = tf.math.is_finite(tf.reduce_sum(tf.cast(matrix, tf.float32), 1, keepdims=True))
        nan = tf.constant(np.nan, values.dtype)
        return (tf.where(finite, tf.gather(matrix, indices, axis=1), nan),)

    def decode_rows(
        self, payload: Payload, row_shape: Shape, dtype: DType, step: Step
    ) -> tf.Tensor:
        values = tf.cast(payload[0], tf.float32)
        indices, lengths = self._indices(tf.TensorShape(row_shape).num_elements(), step)
        if self.unbiased:
            values *= tf.cast(lengths, tf.float32)
        indices = tf.broadcast_to(indices, tf.shape(values))
        return saturating_cast(_scatter(values, indices, row_shape), dtype)

    def row_bytes(self, row_shape: Shape, dtype: DType, step: int | None = None) -> int:
        size = tf.TensorShape(row_shape).num_elements()
        value_size: int = tf.as_dtype(dtype).size
        return _count(self.density, size) * value_size

    def _indices(self, size: int, step: Step) -> tuple[tf.Tensor, tf.Tensor]:
        """One index in each segment, and the lengths of the segments."""
        count = _count(self.density, size)
        bounds = tf.range(count + 1, dtype=tf.int64) * size // max(1, count)
        lengths = bounds[1:] - bounds[:-1]
        seed = tf.stack([tf.constant(self.seed, tf.int64), tf.cast(step, tf.int64)])
        drawn = tf.random.stateless_uniform([count], seed, alg="philox")
        offsets = tf.cast(drawn * tf.cast(lengths, tf.float32), tf.int64)
        # The product may be rounded up to the length.
        indices = bounds[:-1] + tf.minimum(offsets, lengths - 1)
        return indices, lengths


def _scatter(values: tf.Tensor, indices: tf.Tensor, row_shape: Shape) -> tf.Tensor:
    """Scatters values to their indices in rows of zeros.

    In float32, for which all devices have a kernel.
    """
    rows, _ = rows_and_size(values)
    size = tf.TensorShape(row_shape).num_elements()
    return tf.reshape(scatter_rows(tf.cast(values, tf.float32), indices, size), [rows, *row_shape])


def _rows_of(values: tf.Tensor, indices: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Each worker's values and indices, as one row."""
    return [(values[i : i + 1], indices[i : i + 1]) for i in range(values.shape[0])]


def _count(density: float, size: int) -> int:
    return min(size, max(1, int(density * size)))


def _checked_density(density: Any) -> float:
    checked: float = number("density", density, "in (0, 1]", lambda d: 0 < d <= 1)
    return checked
