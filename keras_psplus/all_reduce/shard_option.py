"""The argument `shard=` of `MultiWorkerMirroredStrategy`, and of strategies with its engine."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

from keras_psplus import compression as compression_module
from keras_psplus.all_reduce.reduction.methods import check_rows, compressor_of
from keras_psplus.all_reduce.topology.group_topology import (
    FLAT,
    Hops,
    Topology,
    compressors_per_hop,
)
from keras_psplus.arguments import shown, whole_number
from keras_psplus.compression import ByVariable, Compressor, ErrorFeedback, methods
from keras_psplus.updates import Updates

# Modules of packages above this one, by name; by engines.
_SHARDED = "keras_psplus.sharding.extended", "ShardedExtended"
_BESIDE_TABLES = "keras_psplus.hybrid.engine", "ShardedHybridExtended"
_ON_MESH = "keras_psplus.tensor_parallel.strategy", "ModelParallelExtended"
_ENGINES = {
    "AllReduceEngine": {
        "optimizer": (("keras_psplus.sharding.engine", "ShardedEngine"), _SHARDED),
        "all": (("keras_psplus.sharding.full_engine", "FullyShardedEngine"), _SHARDED),
    },
    "HybridEngine": {
        "optimizer": (("keras_psplus.hybrid.engine", "ShardedHybridEngine"), _BESIDE_TABLES),
        "all": (("keras_psplus.hybrid.engine", "FullyShardedHybridEngine"), _BESIDE_TABLES),
    },
    "ModelParallelEngine": {
        "optimizer": (
            ("keras_psplus.tensor_parallel.engine", "ShardedModelParallelEngine"),
            _ON_MESH,
        ),
        "all": (
            ("keras_psplus.tensor_parallel.engine", "FullyShardedModelParallelEngine"),
            _ON_MESH,
        ),
    },
}
_GRADIENTS, _WEIGHTS = "gradients", "weights"


def check_all(
    shard: str | None,
    shard_group: int | None,
    compression: Any,
    updates: Updates | None,
    topology: Topology | str,
    workers: Sequence[str] | None,
    engine: type,
) -> tuple[Hops, Compressor | None]:
    """Checks the arguments of a strategy that say what workers exchange.

    Returns:
        Compressors of gradients for each hop, and the compressor of weights.
    """
    check(shard, updates, engine)
    of_gradients, of_weights = compressors(compression, shard)
    check_group(shard_group, shard, workers)
    hops = compressors_per_hop(of_gradients, topology)
    check_topology(topology, shard, shard_group, hops)
    return hops, of_weights


def check(shard: str | None, updates: Updates | None, engine: type) -> str | None:
    """Returns `shard`, if it is known and can be combined with the other arguments."""
    if shard is None:
        return None
    if shard not in _ENGINES["AllReduceEngine"]:
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
    if engine.__name__ not in _ENGINES:
        raise ValueError(
            "`shard` is for strategies with the engine of MultiWorkerMirroredStrategy, "
            f"HybridStrategy or ModelParallelStrategy. Received: shard={shard!r}"
        )
    return shard


def compressors(compression: Any, shard: str | None) -> tuple[Any, Compressor | None]:
    """Divides `compression` between gradients and what is gathered of weights.

    Args:
        compression: The argument: a dict with `"gradients"` or `"weights"`, or a compressor of
            gradients.

    Returns:
        `compression` of gradients, and the compressor of weights: of their changes, with error
        feedback, if each worker has all of them; otherwise of their values, without.
    """
    named = set(compression) & {_GRADIENTS, _WEIGHTS} if isinstance(compression, dict) else set()
    if named and (shard is None or len(named) < len(compression)):
        raise ValueError(
            '"gradients" and "weights" are keys of `compression` with `shard`, and have no others '
            "beside them; patterns of variables' paths belong into the dict of one of them, as in "
            '{"gradients": {"*kernel": "int8"}}. '
            f"Received: compression={shown(compression)}, shard={shard!r}"
        )
    if shard is None:
        return compression, None
    of_gradients = compression.get(_GRADIENTS) if named else compression
    for one in methods.each(compressor_of(of_gradients)):
        check_rows(one)
    weights = compression_module.get(compression.get(_WEIGHTS)) if named else None
    for one in methods.each(weights):
        check_rows(one, gathers=True)
    adapt = _with_feedback if shard == "optimizer" else _without_feedback
    return of_gradients, weights.map(adapt) if isinstance(weights, ByVariable) else adapt(weights)


def _with_feedback(compressor: Compressor | None) -> Compressor | None:
    # Also of casts: in float16, small changes would be lost for ever.
    if compressor is None or not compressor.takes_feedback:
        return compressor
    return ErrorFeedback(compressor)


def _without_feedback(compressor: Compressor | None) -> Compressor | None:
    return None if compressor is None else methods.without_feedback(compressor)


def check_reshard(shard: str | None, reshard_after_forward: bool) -> bool:
    """Returns `reshard_after_forward`; raises ValueError if there is nothing that it is for."""
    if reshard_after_forward is not True and (shard != "all" or reshard_after_forward is not False):
        raise ValueError(
            '`reshard_after_forward` must be True or False, and is for `shard="all"`, whose '
            "weights it frees between forward and backward. "
            f"Received: reshard_after_forward={shown(reshard_after_forward)}, shard={shard!r}"
        )
    return reshard_after_forward


def check_group(
    shard_group: int | None, shard: str | None, workers: Sequence[str] | None
) -> int | None:
    """Returns `shard_group`, the number of workers that have the parts of a variable."""
    if shard_group is None:
        return None
    whole_number("shard_group", shard_group, 2)
    is_even = workers is None or len(workers) < 2 or len(workers) % shard_group == 0
    if shard is None or not is_even:
        raise ValueError(
            "`shard_group` is for `shard`: so many consecutive workers have the parts of a "
            "variable, and all workers are groups of this size. "
            f"Received: shard_group={shard_group}, shard={shard!r}, {len(workers or [''])} workers"
        )
    return shard_group


def check_topology(
    topology: Topology | str, shard: str | None, shard_group: int | None, hops: Hops
) -> None:
    """Raises ValueError if parts of variables cannot go along a topology."""
    if shard is None or topology == FLAT:
        return
    if shard_group is not None:
        raise ValueError(
            "`shard_group` has each group of workers keep all parts, and with the groups of "
            "`topology` all workers share them, along another path. Leave one of them out. "
            f"Received: shard_group={shard_group}, topology={shown(topology)}"
        )
    if hops.within is not None:
        raise ValueError(
            "with `shard`, only what goes between the groups of `topology` is compressed: give "
            "`compression` the compressor itself, or "
            '{"gradients": ..., "weights": ...}. '
            f"Received: shard={shard!r}, compression inside groups by {hops.within!r}"
        )


def check_devices(shard: str | None, devices: int) -> None:
    """Raises ValueError if workers with several devices are to shard."""
    if shard is not None and devices > 1:
        raise ValueError(
            "`shard` needs workers with one device each: start a worker for each GPU "
            "(CUDA_VISIBLE_DEVICES), as `keras-psplus run` can. "
            f"Received: shard={shard!r}, {devices} devices"
        )


def classes(
    shard: str, weights: Compressor | None, group: int | None, engine: type
) -> tuple[Any, Any]:
    """Engine and implementation half of a strategy with `shard`."""
    cls, extended = (
        getattr(importlib.import_module(module), name)
        for module, name in _ENGINES[engine.__name__][shard]
    )
    return cls, functools.partial(extended, weights=weights, group_size=group)
