"""Checks of `PipelineStrategy`'s own arguments."""

from typing import Any

from keras_psplus import compression
from keras_psplus.pipeline import schedule

_FOR_ACTIVATIONS = (
    'None, "bf16", "fp16", "int8", `Cast`, `Int8`, or a compressor of your own with '
    "`serves_values = True`"
)


def check_stages(stages: Any) -> list[list[str]] | None:
    """Returns the patterns of each stage's layers; None for `"auto"`.

    Raises:
        ValueError: If it is neither.
    """
    if isinstance(stages, str) and stages == "auto":
        return None
    is_list = isinstance(stages, (list, tuple)) and len(stages) > 0
    lists = [[one] if isinstance(one, str) else one for one in stages] if is_list else []
    fits = is_list and all(
        isinstance(one, (list, tuple)) and one and all(isinstance(p, str) and p for p in one)
        for one in lists
    )
    if not fits:
        raise ValueError(
            '`stages` must be "auto", or a list with a list of patterns of layer names for each '
            'stage, such as [["embedding", "block_0*"], ["block_1*", "head"]]. '
            f"Received: {stages!r}"
        )
    return [list(one) for one in lists]


def check_count(patterns: list[list[str]] | None, count: int) -> None:
    """Sees that there is a worker or a device for each stage.

    Raises:
        ValueError: If there is not.
    """
    if patterns is not None and len(patterns) != count:
        raise ValueError(
            f"`stages` describes {len(patterns)} stages, and there are {count} workers or devices: "
            f"one is needed for each stage. Received: stages={patterns}"
        )


def check_schedule(given: Any) -> str:
    """Returns the name of a schedule.

    Raises:
        ValueError: If there is no such one.
    """
    if not isinstance(given, str) or given not in schedule.NAMES:
        names = ", ".join(f'"{name}"' for name in schedule.NAMES)
        raise ValueError(f"`schedule` must be one of {names}. Received: schedule={given!r}")
    return given


def check_compression(given: Any) -> compression.Compressor | None:
    """Returns the compressor of activations, or None.

    Raises:
        ValueError: If it is none, or does not keep every element nearly as it is.
    """
    compressor = compression.get(given, "activation_compression", _FOR_ACTIVATIONS)
    if compressor is not None and not getattr(compressor, "serves_values", False):
        raise ValueError(
            "`activation_compression` must keep every element of an activation nearly as it is: "
            f"{_FOR_ACTIVATIONS}. Received: activation_compression={given!r}"
        )
    return compressor
