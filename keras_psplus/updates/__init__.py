"""Update rules: how often workers communicate.

Strategies take one as `updates=`.
"""

from collections.abc import Callable

from keras_psplus import specs
from keras_psplus.arguments import shown
from keras_psplus.updates.accumulate import Accumulate
from keras_psplus.updates.base import Context, ReplicaUpdates, Step, Updates, map_values
from keras_psplus.updates.local_sgd import DiLoCo, LocalSGD

__all__ = [
    "Accumulate",
    "Context",
    "DiLoCo",
    "LocalSGD",
    "ReplicaUpdates",
    "Step",
    "Updates",
    "get",
    "map_values",
]

_CLASSES: dict[str, Callable[..., Updates]] = {
    "accumulate": Accumulate,
    "local_sgd": LocalSGD,
    "diloco": DiLoCo,
}


def get(updates: Updates | str | None) -> Updates | None:
    """Checks what a user gives as `updates=`.

    Args:
        updates: `Accumulate`, `LocalSGD`, `DiLoCo`, a text such as `"accumulate:4"`,
            `"local_sgd:8"` or `"diloco:100"` for one of them, or None to communicate at every
            step.

    Returns:
        An `Updates`, or None.

    Raises:
        ValueError: If it is something else.

    Example:

    >>> keras_psplus.updates.get("accumulate:4")
    Accumulate(steps=4, flush=False)
    """
    if updates is None or isinstance(updates, Updates):
        return updates
    parsed = specs.parse(updates, specs.UPDATES) if isinstance(updates, str) else None
    if parsed is not None:
        name, steps = parsed
        return _CLASSES[name](*steps)
    raise ValueError(
        "`updates` must be `keras_psplus.updates.Accumulate(steps)`, `LocalSGD(every)`, "
        f"`DiLoCo(every)`, {specs.UPDATES_ALLOWED}, or None.{specs.hint(updates, specs.UPDATES)} "
        f"Received: updates={shown(updates)}"
    )
