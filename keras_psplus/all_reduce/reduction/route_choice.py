"""Route of a dense gradient, and its weight in a bucket, by compressor and form."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_psplus.compression import Compressor, ErrorFeedback

# Gradients compressed more than 8x share buckets that hold 8x more uncompressed bytes.
_STRONG_COMPRESSION = 8


def route(
    compressor: Compressor | None,
    shape: tf.TensorShape,
    dtype: tf.DType,
    number: int,
    averages: bool = False,
) -> tuple[Any, ...]:
    """The route that sums such a gradient.

    Args:
        number: Number of the gradient, which no other one has.
        averages: Whether there are gradients that are averaged on their way.

    Returns:
        Tuple of the route's name, a method of `CompressedSum`, and of what else those have in
        common that share buckets.
    """
    if not shape.num_elements():
        # There are no collectives of nothing.
        return ("own",)
    if compressor is None:
        # With others that are added up on their way it costs no message of its own.
        return ("mean",) if averages and dtype.is_floating else ("sum", dtype)
    if not compressor.communicates:
        return ("own",)
    if compressor.gathers_factors:
        # Factors are short, and those of one layer long before those of the next.
        return "factors", number
    if compressor.reducible:
        return ("total" if compressor.is_linear else "mean",)
    if compressor.supports_reduce_scatter:
        feedback = compressor if isinstance(compressor, ErrorFeedback) else None
        inner = feedback.inner if feedback else compressor
        options = (feedback.momentum, feedback.factor_masking) if feedback else ()
        return ("split", id(inner), options)
    return ("gather",)


def weight(compressor: Compressor | None, shape: tf.TensorShape, dtype: tf.DType) -> int:
    """Weight of such a gradient in a bucket, in bytes."""
    whole: int = shape.num_elements() * dtype.size
    if compressor is None or not whole:
        return whole
    sent = compressor.wire_bytes(shape, dtype)
    return whole // _STRONG_COMPRESSION if sent * _STRONG_COMPRESSION < whole else whole
