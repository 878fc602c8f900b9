"""Kinds of variables, and a table of those on each parameter server."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from keras_psplus import text_table
from keras_psplus.core.base.metric_state import accumulates
from keras_psplus.core.base.optimizers import unwrapped
from keras_psplus.log import warn_once
from keras_psplus.parameter_server.placement import shard_sizes
from keras_psplus.parameter_server.tracing.worker_function import is_on_ps
from keras_psplus.parameter_server.transport.reads import parts_of
from keras_psplus.parameter_server.transport.sharded import ShardedVariable

_NEED_WHOLE_TENSORS = ("Lamb", "Muon")
# Elements. A closure variable crosses the chief's network with every share of a step.
_LARGEST_STATE = 1 << 16


def kind_of(variable: keras.Variable, shape: Sequence[int] | None, is_sync: bool) -> str | None:
    """Kind of a closure variable, or None for a variable that is none.

    Args:
        shape: Its shape, which it may be about to get.
    """
    if variable._name == "seed_generator_state":
        return "seed"
    if accumulates(variable):
        return "total"
    return "state" if is_sync and _is_state(variable, shape or ()) else None


def _is_state(variable: keras.Variable, shape: Sequence[int]) -> bool:
    """Whether a variable is a layer's own, which steps change otherwise than by gradients."""
    dtype = tf.as_dtype(variable.dtype)
    return (
        variable._is_of_layer
        and not variable.trainable
        and (dtype.is_floating or dtype.is_integer)
        and math.prod(shape) <= _LARGEST_STATE
    )


def bytes_on_ps(variables: Iterable[keras.Variable], num_ps: int) -> list[int]:
    """Bytes of Keras variables on each parameter server, in order."""
    sizes = [0] * num_ps
    for part in itertools.chain.from_iterable(_parts(variable) for variable in variables):
        ps = tf.DeviceSpec.from_string(part.device).task
        sizes[ps] += shard_sizes.size_of(part.shape, part.dtype)
    return sizes


def report(addresses: Sequence[str], weights: Sequence[float], model: keras.Model) -> str:
    """Describes a model's variables, with a table of servers and parts due."""
    optimizer = getattr(model, "optimizer", None)
    slots = list(optimizer.variables) if optimizer is not None else []
    own = {id(variable) for variable in slots}
    variables = [variable for variable in model.variables if id(variable) not in own]
    of_model, of_optimizer = (bytes_on_ps(these, len(addresses)) for these in (variables, slots))
    both = [sum(pair) for pair in zip(of_model, of_optimizer)]
    total = max(sum(both), 1)
    rows = [("ps", "address", "variables MB", "optimizer MB", "part", "of its due")]
    for ps, weight in enumerate(weights):
        rows.append(
            (
                f"ps-{ps}",
                addresses[ps],
                f"{of_model[ps] / 1e6:.2f}",
                f"{of_optimizer[ps] / 1e6:.2f}",
                f"{both[ps] / total:.1%}",
                f"{both[ps] / total / weight:.2f}",
            )
        )
    on_ps = [variable for variable in variables if _parts(variable)]
    cut = sum(isinstance(variable._value, ShardedVariable) for variable in on_ps)
    return (
        f"'{model.name}' on {len(addresses)} parameter servers: {len(on_ps)} variables, {cut} of "
        f"them cut, {total / 1e6:.1f} MB with the optimizer's\n{text_table.aligned(rows)}"
    )


def warn_of_whole_tensors(model: keras.Model) -> None:
    """Warns once of an optimizer that needs whole tensors of a sharded variable."""
    name = type(unwrapped(getattr(model, "optimizer", None))).__name__
    is_cut = any(isinstance(v._value, ShardedVariable) for v in model.trainable_variables)
    if name in _NEED_WHOLE_TENSORS and is_cut:
        warn_once(
            "%s looks at a whole tensor at once, and sees each shard of a variable that is cut "
            "alone: pass `variable_partitioner=None` to the strategy to keep variables whole",
            name,
        )


def _parts(variable: keras.Variable) -> list[tf.Variable]:
    """A variable's shards, or itself, if they lie on parameter servers."""
    return [part for part in parts_of(variable._value) if is_on_ps(part)]
