"""Synchronization modes of workers' steps: `mode` and its further arguments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_psplus import text_table
from keras_psplus.arguments import MOST, shown
from keras_psplus.cluster import environment
from keras_psplus.core.base.optimizers import unwrapped
from keras_psplus.core.graph.metrics import accumulates
from keras_psplus.log import warn_once
from keras_psplus.parameter_server import placement
from keras_psplus.parameter_server.tracing.worker_function import is_on_ps
from keras_psplus.parameter_server.transport.pulls import parts_of
from keras_psplus.parameter_server.transport.sharded import ShardedVariable
from keras_psplus.updates import Updates


class Mode(NamedTuple):
    """The checked arguments.

    Attributes:
        backup_workers: How many workers' gradients a step does without.
        max_staleness: How many steps a worker may be ahead of the slowest one, or None.
    """

    is_sync: bool
    backup_workers: int
    max_staleness: int | None

    @property
    def bound(self) -> float:
        """Maximum number of steps that a worker is ahead of the slowest one."""
        return math.inf if self.max_staleness is None else self.max_staleness

    def window(self, overlaps: bool) -> int:
        """Maximum number of steps under way on a worker: reading, computing and sending."""
        return 3 if overlaps and not self.is_sync else 1

    def check_workers(self, num_workers: int) -> None:
        """Raises ValueError if there are not more workers than backup workers."""
        if self.backup_workers >= num_workers:
            raise ValueError(
                "`backup_workers` must be an integer from 0 to one less than the number of "
                f"workers: every step needs a gradient. Received: "
                f"backup_workers={self.backup_workers}, for {num_workers} worker(s)"
            )


def check_mode(mode: str, backup_workers: int, max_staleness: int | None) -> Mode:
    if not isinstance(mode, str) or mode not in ("async", "sync"):
        raise ValueError(f'`mode` must be "async" or "sync". Received: mode={shown(mode)}')
    if not _is_count(backup_workers):
        raise ValueError(
            "`backup_workers` must be an integer from 0 to one less than the number of workers. "
            f"Received: backup_workers={shown(backup_workers)}"
        )
    if max_staleness is not None and not _is_count(max_staleness):
        raise ValueError(
            "`max_staleness` must be None or an integer of at least 0. "
            f"Received: max_staleness={shown(max_staleness)}"
        )
    if backup_workers and mode != "sync":
        raise ValueError(
            "`backup_workers` has a meaning in synchronous training only, where a step waits for "
            'gradients: pass `mode="sync"`, or 0. '
            f"Received: backup_workers={backup_workers!r}, mode={shown(mode)}"
        )
    if max_staleness is not None and mode != "async":
        raise ValueError(
            "`max_staleness` has a meaning in asynchronous training only: synchronous steps are "
            'never stale. Pass `mode="async"`, or None. '
            f"Received: max_staleness={max_staleness!r}, mode={shown(mode)}"
        )
    return Mode(mode == "sync", backup_workers, max_staleness)


def check_updates(updates: Updates | None, mode: Mode) -> Updates | None:
    if updates is None:
        return None
    if not updates.on_parameter_servers:
        raise ValueError(
            "Under parameter servers, `updates` must be `keras_psplus.updates.Accumulate(steps)`, "
            "`LocalSGD(every)`, or None: workers come one by one, so there is no mean of theirs "
            f"for an outer optimizer to step along. Received: updates={updates!r}"
        )
    if mode.is_sync:
        raise ValueError(
            "`updates` has a meaning in asynchronous training only, where each worker updates by "
            'itself: pass `mode="async"`, give the optimizer `gradient_accumulation_steps`, or '
            f'take `MultiWorkerMirroredStrategy`. Received: updates={updates!r}, mode="sync"'
        )
    if mode.max_staleness is not None:
        raise ValueError(
            "`updates` has a meaning without `max_staleness` only: what workers keep back has no "
            "bound on its age. Pass `max_staleness=None`. "
            f"Received: updates={updates!r}, max_staleness={mode.max_staleness!r}"
        )
    return updates


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def check_overlap(overlap_steps: bool | str, mode: Mode, updates: Updates | None) -> bool | None:
    """Checks `overlap_steps`; returns a bool, or None if the first steps are to show it."""
    is_ruled_out = mode.backup_workers or updates is not None
    if isinstance(overlap_steps, str) and overlap_steps == "auto":
        # Asynchronous steps that overlap are less accurate.
        return None if mode.is_sync and not is_ruled_out else False
    if not isinstance(overlap_steps, (bool, np.bool_)):
        raise ValueError(
            '`overlap_steps` must be "auto", True or False. '
            f"Received: overlap_steps={shown(overlap_steps)}"
        )
    if overlap_steps and is_ruled_out:
        raise ValueError(
            "`overlap_steps` goes without `backup_workers`, whose late workers would have to read "
            "every update before the next step, and without `updates`, with which a worker's step "
            "goes on from what its step before has left. Leave one of them out. "
            f"Received: overlap_steps={overlap_steps}, backup_workers={mode.backup_workers}, "
            f"updates={updates!r}"
        )
    return bool(overlap_steps)


def check_min_workers(min_workers: int | None, mode: Mode, num_workers: int) -> int:
    """Checks with how many workers training begins; None for the launcher's number, or all."""
    least = environment.min_workers() if min_workers is None else min_workers
    if least is None:
        return num_workers
    if not _is_count(least) or not 1 <= least <= num_workers:
        raise ValueError(
            "`min_workers` must be an integer from 1 to the number of workers of the cluster. "
            f"Received: min_workers={shown(least)}, for {num_workers} worker(s)"
        )
    mode.check_workers(least)
    return least


def check_no_min_workers(min_workers: int | None) -> None:
    """Raises ValueError if workers are to come to servers that were started otherwise."""
    if min_workers is not None:
        raise ValueError(
            "`min_workers` needs tasks that this library starts: leave out `cluster_resolver`, and "
            f"set TF_CONFIG in all tasks. Received: min_workers={shown(min_workers)}"
        )


# Kinds of variables, and a table of those on each parameter server.


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
    sizes = [0] * num_ps
    for part in itertools.chain.from_iterable(_parts(variable) for variable in variables):
        ps = tf.DeviceSpec.from_string(part.device).task
        sizes[ps] += placement.size_of(part.shape, part.dtype)
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
