"""Compressors that gradients can be all-reduced with."""

from __future__ import annotations

from typing import Any

from keras_psplus import compression
from keras_psplus.compression import methods

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
