"""Which compressors gradients can be all-reduced with."""

from keras_psplus import compression
from keras_psplus.compression import methods

_METHODS = ("encode", "decode", "wire_bytes", "rounds")


def compressor_of(identifier):
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
            check(one)
    return compressor


def check(compressor):
    """Raises ValueError if a compressor lacks a method that all-reduce calls.

    Args:
        compressor: `Compressor` that has been chosen for a variable.
    """
    if isinstance(compressor, compression.SufficientFactors):
        return
    needed = ["wire_bytes"]
    # Payloads of homogeneous ones are added up without `rounds`.
    by_rounds = compressor.reducible and not compressor.homogeneous
    by_rounds = by_rounds and not methods.missing(compressor, "rounds")
    if compressor.communicates and not by_rounds:
        needed = ["encode", "decode", *needed]
    method = methods.missing(compressor, *needed)
    if method:
        raise ValueError(
            "`compression` must have `encode`, `decode` and `wire_bytes`, or, if it is `reducible` "
            "and not `homogeneous`, `rounds` and `wire_bytes`. "
            f"Received: compression={compressor!r}, without `{method}`"
        )
