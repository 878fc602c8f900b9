"""Compressors that gradients can be all-reduced with."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_psplus import compression
from keras_psplus.compression import Compressor, ErrorFeedback, methods

_METHODS = ("encode", "decode", "wire_bytes", "exchange")


def compressor_of(identifier: Any) -> compression.Compressor | None:
    """Makes a strategy's compressor.

    Args:
        identifier: What a user gives as `compression`.

    Returns:
        A `Compressor`, with error feedback if it asks for it, or None.

    Raises:
        ValueError: If it is unknown, or lacks a method that all-reduce calls.
    """
    compressor = compression.with_error_feedback(compression.get(identifier))
    for one in methods.each(compressor):
        # One that has nothing but a choice of its own chooses among others, checked when it does.
        has_none = all(methods.missing(one, method) for method in _METHODS)
        if not has_none or methods.missing(one, "for_variable"):
            check_compressor(one)
    return compressor


def check_rows(compressor: compression.Compressor, gathers: bool = False) -> compression.Compressor:
    """Returns a compressor that can encode the rows that workers exchange with `shard`.

    Args:
        gathers: Whether they are of values that layers compute with.

    Raises:
        ValueError: If it cannot.
    """
    inner = methods.without_feedback(compressor)
    fits = compressor.supports_reduce_scatter and compressor.communicates
    if not (fits and (inner.supports_values or not gathers)):
        what, signs = ("weights", "") if gathers else ("gradients", ', "sign"')
        raise ValueError(
            f'with `shard`, {what} can be sent by "bf16", "fp16", "int8"{signs}, or a compressor '
            "that `supports_reduce_scatter`, and for weights also `supports_values`: each worker "
            f"has one piece. Received: compression={compressor!r} for {what}"
        )
    return compressor


def check_compressor(compressor: compression.Compressor) -> None:
    """Raises ValueError if a compressor lacks a method that all-reduce calls."""
    if compressor.gathers_factors:
        return
    needed = ["wire_bytes"]
    # Payloads of linear ones are added up without `exchange`.
    by_exchange = compressor.reducible and not compressor.is_linear
    by_exchange = by_exchange and not methods.missing(compressor, "exchange")
    if compressor.communicates and not by_exchange:
        needed = ["encode", "decode", *needed]
    method = methods.missing(compressor, *needed)
    if method:
        raise ValueError(
            "`compression` must have `encode`, `decode` and `wire_bytes`, or, if it is `reducible` "
            "and not `is_linear`, `exchange` and `wire_bytes`. "
            f"Received: compression={compressor!r}, without `{method}`"
        )


class IdentityCompressor(compression.Compressor):
    """Sends a tensor as it is, together with others that are compressed."""

    reducible = True

    def encode(
        self, tensor: tf.Tensor, state: Any, step: tf.Tensor
    ) -> tuple[tuple[tf.Tensor, ...], Any]:
        return (tensor,), state

    def decode(
        self, payload: tuple[tf.Tensor, ...], shape: Any, dtype: tf.DType, step: tf.Tensor
    ) -> tf.Tensor:
        return payload[0]

    def wire_bytes(self, shape: Any, dtype: tf.DType, step: int | None = None) -> int:
        return tf.TensorShape(shape).num_elements() * tf.as_dtype(dtype).size


IDENTITY = IdentityCompressor()


# Route of a dense gradient, and its weight in a bucket, by compressor and form.


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
