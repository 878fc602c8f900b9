"""Epochs of Keras's iterator, as long as their data, or their rest.

Keras counts the steps of the first epoch where data do not say how many they are, and takes no more
in later ones. Data that come shuffled out over workers, or from a service, have another number in
each epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from keras_psplus.core.data import data_position
from keras_psplus.keras_internals.keras_parts import epoch_iterator

if TYPE_CHECKING:
    from keras_psplus.core.strategy_engine import StrategyEngine
    from keras_psplus.engine import Call


def make_without_data(call: Call) -> Any:
    """Runs the part of the constructor that reads no data; returns the iterator."""
    iterator, args, kwargs = call.owner, list(call.args), dict(call.kwargs)
    strategy = args.pop(0) if args else kwargs.pop("distribute_strategy", None)
    epoch_iterator.EpochIterator.__init__(iterator, *args, **kwargs)
    iterator._distribute_strategy = strategy
    return iterator


def begin(call: Call) -> Any:
    """Begins to iterate, and skips what was trained before."""
    result = call.proceed()
    engine = cast("StrategyEngine", call.engine)
    before = engine.progress.begin_iteration(call.owner)
    if before is not None:
        engine.skip_data(call.owner, *before)
    return result


def enumerate_steps(call: Call) -> Iterator[Any]:
    """Yields the steps of one epoch, as many as its data have."""
    call.owner._num_batches = call.owner.data_adapter.num_batches
    steps: Iterator[Any] = call.proceed()
    return steps


def warn_of_early_end(call: Call) -> Any:
    """Warns of data of known length that end before the steps that Keras expects."""
    iterator = call.owner
    if iterator._steps_seen <= iterator.steps_per_execution:
        data_position.check_rows_came(iterator.data_adapter)
    elif iterator.steps_per_epoch is None and iterator.data_adapter.num_batches is None:
        return None  # this is how data of unknown length end
    return call.proceed()


def end_progress(call: Call) -> None:
    """Leaves the progress bar without a number of steps if it had none."""
    has_no_target = call.owner.target is None
    call.proceed()
    if has_no_target:
        call.owner.target = None
