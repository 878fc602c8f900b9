"""Times of a model's layers, measured on a stage's device or estimated from operations."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_psplus.core.data import data_seeds
from keras_psplus.keras_internals.keras_parts import global_state, tree
from keras_psplus.log import logger
from keras_psplus.pipeline.split import timing
from keras_psplus.pipeline.split.costs import LayerCost
from keras_psplus.pipeline.split.timing import Times

_SEED_GENERATOR, _NAMES = "global_seed_generator", "object_name_uids"
# Seconds after which no other layer is measured.
_BUDGET = 20.0
# A step of fewer operations is over before a measurement would be.
_LEAST_FLOPS = 1e9
# A backward pass computes gradients by inputs and by weights.
_BACKWARD = 2
# A dead worker is the job's matter, not a layer's.
_FATAL = (tf.errors.UnavailableError, tf.errors.AbortedError)


def is_worth_it(costs: Sequence[LayerCost], rows: int) -> bool:
    """Whether a step of a batch takes long enough for layers to be measured.

    Args:
        rows: Rows of a batch.
    """
    return (1 + _BACKWARD) * rows * sum(cost.flops for cost in costs) >= _LEAST_FLOPS


def counted(costs: Sequence[LayerCost]) -> list[Times]:
    """Times as floating-point operations for a row have them, in no unit."""
    # Layers without work (Flatten, Dropout in evaluation) count a little: they are calls.
    return [Times(cost.flops + 0.5, _BACKWARD * cost.flops + 0.5) for cost in costs]


def measured(costs: Sequence[LayerCost], rows: int, device: str) -> list[Times] | None:
    """Measures layers, one at a time, those with the most operations first.

    Layers that are alike are measured once. One that cannot be measured, or comes too late, takes
    as long for an operation as those that were measured.

    Args:
        rows: Rows of a micro-batch.

    Returns:
        List of `Times` in milliseconds for a micro-batch; None if no layer could be measured.
    """
    keys = [_key(cost) for cost in costs]
    deadline = time.monotonic() + _BUDGET
    found: dict[Any, Times | None] = {}
    reasons = {}
    for cost, key in sorted(zip(costs, keys), key=lambda pair: -pair[0].flops):
        if key in found:
            continue
        if time.monotonic() > deadline:
            reasons[cost.layer.name] = f"{_BUDGET:g} s are over"
            continue
        try:
            found[key] = _of_layer(cost, rows, device)
        except _FATAL:
            raise
        except Exception as error:
            found[key] = None
            reasons[cost.layer.name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    times = [found.get(key) for key in keys]
    if reasons:
        name, reason = next(iter(reasons.items()))
        rest = f" and {len(reasons) - 1} other(s)" if len(reasons) > 1 else ""
        logger.info(
            "%s could not be measured, and is judged by its floating-point operations (%s)",
            f"the layer '{name}'{rest}",
            reason,
        )
    if not any(times):
        return None
    known = [(cost.flops, one) for cost, one in zip(costs, times) if one is not None]
    flops = sum(flops for flops, _ in known) or 1.0
    forward = sum(one.forward for _, one in known) / flops
    backward = sum(one.backward for _, one in known) / flops
    return [
        one or Times(forward * cost.flops, backward * cost.flops) for cost, one in zip(costs, times)
    ]


def _of_layer(cost: LayerCost, rows: int, device: str) -> Times:
    if None in cost.calls:
        raise timing.CannotBeTimed("it is called with something else than dense tensors")
    with _isolated_global_state():
        times = [timing.time_layer_call(cost.layer, call, rows, device) for call in cost.calls]
    return Times(sum(one.forward for one in times), sum(one.backward for one in times))


def _key(cost: LayerCost) -> tuple[Any, ...]:
    """Key of a layer, equal for layers that take equally long."""
    layer = cost.layer
    try:
        config = json.dumps(_without_names(layer.get_config()), sort_keys=True, default=str)
    except Exception:  # It cannot be saved either.
        config = str(id(layer))
    variables = tuple((tuple(v.shape), str(v.dtype), v.trainable) for v in layer.variables)
    calls = tuple(
        (str(tree.flatten((call.args, call.kwargs))) if call else None) for call in cost.calls
    )
    return type(layer), config, variables, calls, cost.flops


def _without_names(config: Any) -> Any:
    if isinstance(config, dict):
        return {key: _without_names(value) for key, value in config.items() if key != "name"}
    return [_without_names(one) for one in config] if isinstance(config, (list, tuple)) else config


@contextlib.contextmanager
def _isolated_global_state() -> Iterator[None]:
    """Context after which seeds and the counters of names are what they were.

    A layer may make layers, or draw numbers of a generator that is made then, in its `call`. What
    the script makes after this has the names and first values that it has without.
    """
    generator = global_state.get_global_attribute(_SEED_GENERATOR)
    names = global_state.get_global_attribute(_NAMES)
    had = None if names is None else dict(names)
    try:
        with data_seeds.untouched():
            yield
    finally:
        global_state.set_global_attribute(_SEED_GENERATOR, generator)
        names = global_state.get_global_attribute(_NAMES)
        if names is not None:
            names.clear()
            names.update(had or {})
