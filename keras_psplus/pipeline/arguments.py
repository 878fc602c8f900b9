"""Checks of `PipelineStrategy`'s own arguments."""

from typing import Any

from keras_psplus import compression
from keras_psplus.compression import methods
from keras_psplus.pipeline.base import schedule

_FOR_ACTIVATIONS = (
    'None, "bf16", "fp16", "int8", `Cast`, `Int8`, or a compressor of your own with '
    "`supports_values = True`"
)

_FOR_GRADIENTS = (
    'None, "bf16", "fp16", `Cast` without `error_feedback`, or a dict from patterns of variables\' '
    "paths to these"
)


def check_stages(stages: Any) -> list[list[str]] | None:
    """Returns the patterns of each stage's layers; None for `"auto"` and `"flops"`.

    Raises:
        ValueError: If it is none of these.
    """
    if isinstance(stages, str) and stages in ("auto", "flops"):
        return None
    is_list = isinstance(stages, (list, tuple)) and len(stages) > 0
    lists = [[one] if isinstance(one, str) else one for one in stages] if is_list else []
    fits = is_list and all(
        isinstance(one, (list, tuple)) and one and all(isinstance(p, str) and p for p in one)
        for one in lists
    )
    if not fits:
        raise ValueError(
            '`stages` must be "auto", "flops", or a list with a list of patterns of layer names '
            'for each stage, such as [["embedding", "block_0*"], ["block_1*", "head"]]. '
            f"Received: {stages!r}"
        )
    return [list(one) for one in lists]


def check_count(patterns: list[list[str]] | None, count: int, pipelines: int = 1) -> None:
    """Sees that there is a worker or a device for each stage of each pipeline.

    Args:
        patterns: What `check_stages` has returned.
        count: Number of workers or devices.

    Raises:
        ValueError: If there is not.
    """
    if count % pipelines:
        few, many = count // pipelines * pipelines, -(-count // pipelines) * pipelines
        fitting = f"{many} workers" if few == 0 else f"{few} or {many} workers"
        raise ValueError(
            f"{count} workers or devices cannot be divided over {pipelines} pipelines, each of "
            f"which has as many stages: start {fitting}, or pass another `pipelines`. "
            f"Received: pipelines={pipelines}"
        )
    if patterns is not None and len(patterns) * pipelines != count:
        of_each = f" of each of the {pipelines} pipelines" if pipelines > 1 else ""
        raise ValueError(
            f"`stages` describes {len(patterns)} stages, and there are {count} workers or devices: "
            f"one is needed for each stage{of_each}. Received: stages={patterns}"
        )


def check_schedule(given: Any, pipelines: int) -> str:
    """Returns the name of a schedule.

    Raises:
        ValueError: If there is no such one, or it does not go with several pipelines.
    """
    if not isinstance(given, str) or given not in schedule.NAMES:
        names = ", ".join(f'"{name}"' for name in schedule.NAMES)
        raise ValueError(f"`schedule` must be one of {names}. Received: schedule={given!r}")
    if given == schedule.PIPEDREAM and pipelines > 1:
        raise ValueError(
            '`schedule="pipedream"` has one pipeline, as the weights of two batches that are under '
            'way differ. Pass `schedule="1f1b"` for several pipelines. '
            f"Received: schedule={given!r}, pipelines={pipelines}"
        )
    return given


def check_gradient_compression(given: Any, pipelines: int) -> compression.Compressor | None:
    """Returns the compressor of gradients between pipelines, or None.

    Raises:
        ValueError: If it is no cast, or if there is one pipeline.
    """
    compressor = compression.get(given, allowed=_FOR_GRADIENTS)
    if compressor is not None and pipelines == 1:
        raise ValueError(
            "`compression` is for gradients that pipelines send each other, and there is one "
            "pipeline. Pass `pipelines=2` or more, or `activation_compression` for what stages "
            f"send each other. Received: compression={given!r}, pipelines=1"
        )
    for one in methods.each(compressor):
        if not isinstance(one, compression.Cast) or one.error_feedback:
            raise ValueError(
                "`compression` casts the gradients that pipelines send each other, which leave no "
                f"residuals: it must be {_FOR_GRADIENTS}. Received: compression={one!r}"
            )
    return compressor


def check_compression(given: Any) -> compression.Compressor | None:
    """Returns the compressor of activations, or None.

    Raises:
        ValueError: If it is none, or does not keep every element nearly as it is.
    """
    compressor = compression.get(given, "activation_compression", _FOR_ACTIVATIONS)
    if compressor is not None and not getattr(compressor, "supports_values", False):
        raise ValueError(
            "`activation_compression` must keep every element of an activation nearly as it is: "
            f"{_FOR_ACTIVATIONS}. Received: activation_compression={given!r}"
        )
    return compressor
