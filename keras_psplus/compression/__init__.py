"""Compression of gradients: pure functions of a tensor and a state, which strategies own."""

from keras_psplus.compression.averaging import mean_all
from keras_psplus.compression.base import Compressor
from keras_psplus.compression.by_variable import ByVariable
from keras_psplus.compression.cast import Cast
from keras_psplus.compression.error_feedback import ErrorFeedback, with_error_feedback
from keras_psplus.compression.low_rank import PowerSGD
from keras_psplus.compression.no_communication import NoCommunication
from keras_psplus.compression.quantize import Int8, Sign
from keras_psplus.compression.rows import RowCompressor
from keras_psplus.compression.sparsify import RandomK, TopK
from keras_psplus.compression.sufficient_factors import SufficientFactors
from keras_psplus.compression.wire import pack, unpack

__all__ = [
    "ByVariable",
    "Cast",
    "Compressor",
    "ErrorFeedback",
    "Int8",
    "NoCommunication",
    "PowerSGD",
    "RandomK",
    "RowCompressor",
    "Sign",
    "SufficientFactors",
    "TopK",
    "get",
    "mean_all",
    "pack",
    "unpack",
    "with_error_feedback",
]

_HALVES = {"bf16": "bfloat16", "fp16": "float16"}


def _half(name):
    if name not in _HALVES:
        raise ValueError(name)
    return _HALVES[name]


# What a short name makes, and the type of what is after its colon.
_NAMES = {
    "bf16": (lambda: Cast("bfloat16"), None),
    "fp16": (lambda: Cast("float16"), None),
    "int8": (Int8, int),
    "sign": (Sign, int),
    "topk": (TopK, float),
    "randomk": (RandomK, float),
    "powersgd": (PowerSGD, int),
    "factors": (SufficientFactors, _half),
}
_NEED_A_NUMBER = ("topk", "randomk", "powersgd")
_ALLOWED = (
    '"bf16", "fp16", "int8", "sign", "topk:0.01" (or another density), "randomk:0.1", '
    '"powersgd:4" (or another rank), "factors", "factors:bf16", "factors:fp16", a '
    "`keras_psplus.compression.Compressor`, a dict from patterns of variable paths to one of "
    "these, or None"
)


def get(identifier, argument="compression", allowed=_ALLOWED):
    """Makes a compressor of what a user writes for one.

    Args:
        identifier: A `Compressor`; None; a dict for `ByVariable`, of these; or a name: `"bf16"`,
            `"fp16"`, `"int8"`, `"sign"` (both also with a block size, `"int8:128"`),
            `"topk:0.01"`, `"randomk:0.1"` (with a density), `"powersgd:4"` (with a rank), or
            `"factors"` (also with a type, `"factors:bf16"`).
        argument: Name of the argument that it was given as, for the message of an error.
        allowed: What this argument may be, for the same.

    Returns:
        A `Compressor` without error feedback (see `with_error_feedback`), or None.

    Raises:
        ValueError: If it is something else.

    Example:

    >>> keras_psplus.compression.get("topk:0.01").density
    0.01
    """
    if identifier is None or isinstance(identifier, Compressor):
        return identifier
    if isinstance(identifier, dict):
        return ByVariable(
            {
                pattern: get(inner, f"{argument}[{pattern!r}]", allowed)
                for pattern, inner in identifier.items()
            }
        )
    if isinstance(identifier, str):
        name, *numbers = identifier.split(":")
        make, number_type = _NAMES.get(name, (None, None))
        counts = (1,) if name in _NEED_A_NUMBER else (0, 1) if number_type else (0,)
        if make is not None and len(numbers) in counts:
            try:
                arguments = [number_type(number) for number in numbers]
            except ValueError:
                pass
            else:
                return make(*arguments)
    raise ValueError(f"`{argument}` must be {allowed}. Received: {argument}={identifier!r}")
