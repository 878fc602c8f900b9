"""Compression of gradients: pure functions of a tensor and a state, which strategies own."""

from collections.abc import Callable
from typing import Any

from keras_psplus import specs
from keras_psplus.arguments import shown
from keras_psplus.compression.averaging import exchange_means
from keras_psplus.compression.base import Compressor
from keras_psplus.compression.by_variable import ByVariable
from keras_psplus.compression.cast import Cast
from keras_psplus.compression.error_feedback import ErrorFeedback, with_error_feedback
from keras_psplus.compression.low_rank import PowerSGD
from keras_psplus.compression.no_communication import NoCommunication
from keras_psplus.compression.quantize import Int8, Sign
from keras_psplus.compression.rows import RowCompressor
from keras_psplus.compression.sparse import RandomK, TopK
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
    "exchange_means",
    "pack",
    "unpack",
    "with_error_feedback",
]

_MAKERS: dict[str, Callable[..., Compressor]] = {
    "bf16": lambda: Cast("bfloat16"),
    "fp16": lambda: Cast("float16"),
    "int8": Int8,
    "sign": Sign,
    "topk": TopK,
    "randomk": RandomK,
    "powersgd": PowerSGD,
    "factors": SufficientFactors,
}
_ALLOWED = (
    f"{specs.COMPRESSION_ALLOWED}, a "
    "`keras_psplus.compression.Compressor`, a dict from patterns of variable paths to one of "
    "these, or None"
)


def get(
    identifier: Compressor | str | dict[Any, Any] | None,
    argument: str = "compression",
    allowed: str = _ALLOWED,
) -> Compressor | None:
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
        parsed = specs.parse(identifier, specs.COMPRESSION)
        if parsed is not None:
            name, arguments = parsed
            return _MAKERS[name](*arguments)
    hint = specs.hint(identifier, specs.COMPRESSION)
    raise ValueError(
        f"`{argument}` must be {allowed}.{hint} Received: {argument}={shown(identifier)}"
    )
