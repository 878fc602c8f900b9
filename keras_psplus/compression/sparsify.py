"""A few elements of each tensor."""

import numbers

import numpy as np
import tensorflow as tf

from keras_psplus.compression.cast import saturating_cast
from keras_psplus.compression.largest import places_of_largest
from keras_psplus.compression.rows import RowCompressor, rows_and_size


class TopK(RowCompressor):
    """Sends the largest elements and their places (Deep Gradient Compression).

    Numbers that are not finite count as the largest.

    Args:
        density: Part of the elements that is sent, in (0, 1]; at least one element is.
        warmup_epochs: Over so many epochs the density falls exponentially to `density`; the shapes
            of the payload are unknown to the graph then.
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

    splits = False

    def __init__(
        self,
        density,
        warmup_epochs=0,
        steps_per_epoch=None,
        momentum_correction=0.0,
        factor_masking=True,
        error_feedback=True,
    ):
        self.density = _checked_density(density)
        if warmup_epochs and not (warmup_epochs > 0 and (steps_per_epoch or 0) > 0):
            raise ValueError(
                "`warmup_epochs` must not be negative, and needs a positive `steps_per_epoch`. "
                f"Received: warmup_epochs={warmup_epochs!r}, steps_per_epoch={steps_per_epoch!r}"
            )
        if not 0 <= momentum_correction < 1:
            raise ValueError(
                "`momentum_correction` must be in [0, 1). "
                f"Received: momentum_correction={momentum_correction!r}"
            )
        self.warmup_epochs = warmup_epochs
        self.steps_per_epoch = steps_per_epoch
        self.momentum_correction = momentum_correction
        self.factor_masking = factor_masking
        self.error_feedback = error_feedback
        self.compresses_rows = not error_feedback

    @property
    def feedback_options(self):
        if not self.momentum_correction:
            return {}
        return {"momentum": self.momentum_correction, "factor_masking": self.factor_masking}

    def encode_rows(self, values, step):
        rows, size = rows_and_size(values)
        matrix = tf.reshape(values, [rows, size])
        magnitudes = tf.abs(tf.cast(matrix, tf.float32))
        # Looked for in all of them only if there is one.
        magnitudes = tf.cond(
            tf.math.is_finite(tf.reduce_sum(magnitudes)),
            lambda: tf.identity(magnitudes),
            lambda: tf.where(tf.math.is_finite(magnitudes), magnitudes, np.float32(np.inf)),
        )
        places = places_of_largest(magnitudes, self._count_at(size, step))
        return tf.gather(matrix, places, batch_dims=1), places

    def decode_rows(self, payload, row_shape, dtype, step):
        values, places = payload
        return tf.cast(_scatter(values, places, row_shape), dtype)

    def left_out(self, total, payload, dtype, step):
        values, places = payload
        if dtype != tf.float32:
            return super().left_out(total, payload, dtype, step)
        # Nothing is left where something was sent; but of what is not finite, that has to show.
        flat = tf.reshape(total, [-1])
        nothing = tf.reshape(values, [-1]) * 0.0
        flat = tf.tensor_scatter_nd_update(flat, tf.reshape(places, [-1, 1]), nothing)
        return tf.reshape(flat, total.shape)

    def add_to(self, total, payload, dtype, step):
        values, places = payload
        flat = tf.reshape(total, [-1])
        values = tf.cast(tf.reshape(values, [-1]), tf.float32)
        flat = tf.tensor_scatter_nd_add(flat, tf.reshape(places, [-1, 1]), values)
        return tf.reshape(flat, total.shape)

    def row_bytes(self, row_shape, dtype, step=None):
        counts = self._counts(tf.TensorShape(row_shape).num_elements())
        stage = self.warmup_epochs
        if step is not None and stage:
            stage = min(stage, step // self.steps_per_epoch)
        return counts[stage] * (tf.as_dtype(dtype).size + 4)

    def _counts(self, size):
        """How many elements are sent in each epoch of the warm-up, and after it."""
        epochs = range(1, self.warmup_epochs + 2)
        return [_count(self.density ** (e / (self.warmup_epochs + 1)), size) for e in epochs]

    def _count_at(self, size, step):
        counts = self._counts(size)
        if not self.warmup_epochs:
            return counts[0]
        stage = tf.cast(step, tf.int64) // self.steps_per_epoch
        return tf.gather(tf.constant(counts), tf.minimum(stage, self.warmup_epochs))


class RandomK(RowCompressor):
    """Sends elements at random places, the same on all workers at a step.

    Each of `density * size` stretches of equal length gives one element, drawn anew at each step
    from a seed that all workers share; so only values are sent, and they can be all-reduced. If a
    number is not finite anywhere in the tensor, all that is sent is NaN.

    Args:
        density: Part of the elements that is sent, in (0, 1]; at least one element is.
        unbiased: Multiply what is sent by the length of its stretch, such that the mean over steps
            is right. Not together with error feedback, with which this diverges.
        seed: Of the places.
        error_feedback: Whether strategies send what was left out in later steps. By default,
            unless `unbiased`. Rows of embeddings, where that is not possible, are then sent whole.

    Example:

    >>> randomk = keras_psplus.compression.RandomK(0.25)
    >>> payload, _ = randomk.encode(tf.range(8.0), (), step=0)
    >>> payload[0].shape
    TensorShape([1, 2])

    Reference: [Stich et al., 2018](https://arxiv.org/abs/1809.07599),
    [Konečný et al., 2016](https://arxiv.org/abs/1610.05492) (random masks from a seed).
    """

    reducible = True

    def __init__(self, density, unbiased=False, seed=0, error_feedback=None):
        self.density = _checked_density(density)
        if unbiased and error_feedback:
            raise ValueError(
                "`unbiased` scaling diverges with error feedback; choose one. "
                f"Received: unbiased={unbiased!r}, error_feedback={error_feedback!r}"
            )
        self.unbiased = unbiased
        self.seed = seed
        self.error_feedback = not unbiased if error_feedback is None else error_feedback
        self.compresses_rows = not self.error_feedback

    def encode_rows(self, values, step):
        rows, size = rows_and_size(values)
        matrix = tf.reshape(values, [rows, size])
        places, _ = self._places(size, step)
        finite = tf.reduce_all(tf.math.is_finite(matrix), 1, keepdims=True)
        nan = tf.constant(np.nan, values.dtype)
        return (tf.where(finite, tf.gather(matrix, places, axis=1), nan),)

    def decode_rows(self, payload, row_shape, dtype, step):
        values = tf.cast(payload[0], tf.float32)
        places, lengths = self._places(tf.TensorShape(row_shape).num_elements(), step)
        if self.unbiased:
            values *= tf.cast(lengths, tf.float32)
        places = tf.broadcast_to(places, tf.shape(values))
        return saturating_cast(_scatter(values, places, row_shape), dtype)

    def row_bytes(self, row_shape, dtype, step=None):
        size = tf.TensorShape(row_shape).num_elements()
        return _count(self.density, size) * tf.as_dtype(dtype).size

    def _places(self, size, step):
        """One place in each stretch, and the lengths of the stretches."""
        count = _count(self.density, size)
        bounds = tf.range(count + 1, dtype=tf.int64) * size // max(1, count)
        lengths = bounds[1:] - bounds[:-1]
        seed = tf.stack([tf.constant(self.seed, tf.int64), tf.cast(step, tf.int64)])
        drawn = tf.random.stateless_uniform([count], seed, alg="philox")
        offsets = tf.cast(drawn * tf.cast(lengths, tf.float32), tf.int64)
        # The product may be rounded up to the length.
        places = bounds[:-1] + tf.minimum(offsets, lengths - 1)
        return tf.cast(places, tf.int32), lengths


def _scatter(values, places, row_shape):
    """Puts values at their places in rows of zeros; in float32, for which all devices have it."""
    rows, _ = rows_and_size(values)
    size = tf.TensorShape(row_shape).num_elements()
    row_of = tf.broadcast_to(tf.range(rows)[:, tf.newaxis], tf.shape(places))
    at = tf.stack([row_of, places], -1)
    matrix = tf.scatter_nd(at, tf.cast(values, tf.float32), tf.stack([rows, size]))
    return tf.reshape(matrix, [rows, *row_shape])


def _count(density, size):
    return min(size, max(1, int(density * size)))


def _checked_density(density):
    if not isinstance(density, numbers.Real) or not 0 < density <= 1:
        raise ValueError(f"`density` must be in (0, 1]. Received: density={density!r}")
    return density
