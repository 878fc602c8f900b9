"""The argument `shard=` of `MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import importlib
from typing import Any

from keras_psplus.arguments import shown
from keras_psplus.updates import Updates

# Modules of a package above this one, by name, as a file in `strategies/` is.
_ENGINES = {
    "optimizer": ("keras_psplus.sharding.engine", "ShardedEngine"),
    "all": ("keras_psplus.sharding.full_engine", "FullyShardedEngine"),
}
_EXTENDED = "keras_psplus.sharding.extended", "ShardedExtended"


def check(shard: str | None, updates: Updates | None, is_plain: bool, **others: Any) -> str | None:
    """Returns `shard`, if it is known and can be combined with the other arguments.

    Args:
        shard: The argument.
        updates: The strategy's `updates`.
        is_plain: Whether the strategy's engine is that of all-reduce.
        **others: Other arguments, which have to be None.

    Raises:
        ValueError: If it is not, or cannot.
    """
    if shard is None:
        return None
    if shard not in _ENGINES:
        raise ValueError(
            '`shard` must be None, "optimizer", which leaves to each worker a part of the '
            'optimizer\'s state, or "all", which leaves it a part of the weights, too. '
            f"Received: shard={shown(shard)}"
        )
    if updates is not None and updates.local:
        raise ValueError(
            "`shard` needs workers that update their weights together: with `LocalSGD` and "
            "`DiLoCo` each has an optimizer of its own between two exchanges, whose state is not "
            "that of the others. Leave one of them out. "
            f"Received: shard={shard!r}, updates={updates!r}"
        )
    for name, value in others.items():
        if value is not None and value != "flat":
            raise ValueError(
                f"`shard` cannot be combined with `{name}` yet. Leave one of them out. "
                f"Received: shard={shard!r}, {name}={shown(value)}"
            )
    if not is_plain:
        raise ValueError(
            "`shard` is for strategies with the engine of MultiWorkerMirroredStrategy. "
            f"Received: shard={shard!r}"
        )
    return shard


def check_reshard(shard: str | None, reshard_after_forward: bool) -> bool:
    """Returns `reshard_after_forward`; raises ValueError if there is nothing that it is for."""
    if reshard_after_forward is not True and (shard != "all" or reshard_after_forward is not False):
        raise ValueError(
            '`reshard_after_forward` must be True or False, and is for `shard="all"`, whose '
            "weights it frees between forward and backward. "
            f"Received: reshard_after_forward={shown(reshard_after_forward)}, shard={shard!r}"
        )
    return reshard_after_forward


def check_devices(shard: str | None, devices: int) -> None:
    """Raises ValueError if workers with several devices are to shard."""
    if shard is not None and devices > 1:
        raise ValueError(
            "`shard` needs workers with one device each: start a worker for each GPU "
            "(CUDA_VISIBLE_DEVICES), as `keras-psplus run` can. "
            f"Received: shard={shard!r}, {devices} devices"
        )


def classes(shard: str) -> tuple[Any, Any]:
    """Engine and implementation half of a strategy with `shard`."""
    engine, extended = (
        getattr(importlib.import_module(module), name)
        for module, name in (_ENGINES[shard], _EXTENDED)
    )
    return engine, extended
