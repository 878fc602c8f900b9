"""Position in `fit`'s data, also in data whose number of steps is unknown."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_psplus.core.data import iterator_release
from keras_psplus.datasets import service
from keras_psplus.keras_internals.keras_parts import data_adapter, tf_dataset_adapter
from keras_psplus.log import logger

# Data adapter for workers' separate data, whose number of steps is unknown.


class UnknownLength(data_adapter.DataAdapter):
    """A data adapter whose number of steps shows only when all workers have run out.

    Attributes:
        of: The data adapter of this worker's data.
    """

    def __init__(self, adapter: data_adapter.DataAdapter) -> None:
        self.of = adapter

    def get_tf_dataset(self) -> tf.data.Dataset:
        return self.of.get_tf_dataset()

    def on_epoch_begin(self) -> None:
        self.of.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.of.on_epoch_end()

    @property
    def num_batches(self) -> None:
        return None

    @property
    def batch_size(self) -> int | None:
        size: int | None = self.of.batch_size
        return size


def check_rows_came(adapter: data_adapter.DataAdapter) -> None:
    """Sees that a lost data service is not taken for the end of data."""
    adapter = adapter.of if isinstance(adapter, UnknownLength) else adapter
    if isinstance(adapter, tf_dataset_adapter.TFDatasetAdapter):
        service.check_rows_came(adapter.get_tf_dataset())


# Resumes `fit`'s data after the last trained batch.


def skip(iterator: Any, epochs: int, batches: int) -> None:
    """Advances an epoch iterator to a batch of an epoch.

    To be called when an iteration has begun. The data have the order of the first run, also when
    they are shuffled, because an iterator is opened for each earlier epoch here, too. Batches are
    read only where an epoch begins in the middle of the data (`steps_per_epoch`).

    Args:
        iterator: Keras's epoch iterator, of which nothing has been read.
        epochs: How many epochs come before.
        batches: How many batches of the present epoch do.

    Raises:
        ValueError: If the position is in the middle of an execution of several steps.
    """
    several = iterator.steps_per_execution
    if batches % several and batches != iterator.num_batches:
        raise ValueError(
            f"The last backup was made after {batches} batches of an epoch, no multiple of "
            "`steps_per_execution`: start the job again with the one that it had. "
            f"Received: steps_per_execution={several}"
        )
    if epochs:
        _pass_epochs(iterator, epochs)
        # What Keras had begun.
        iterator._epoch_iterator = iterator._enumerate_iterator()
    for _ in range(0, batches, several):
        begun = next(iterator._epoch_iterator, None)
        if begun is None:
            return
        _draw(begun[2], several)


def _pass_epochs(iterator: Any, epochs: int) -> None:
    """Opens and closes the iterators of earlier epochs.

    With `steps_per_epoch`, the next epoch continues in the same iterator, so their batches are
    read.
    """
    if iterator.steps_per_epoch:
        for _ in range(epochs):
            for _, _, of_epoch in iterator._enumerate_iterator():
                _draw(of_epoch, iterator.steps_per_execution)
        return
    several, passes = iterator.steps_per_execution, _Passes()
    # Keras tells the data of each epoch, in one execution, and says how often it begins them.
    iterator.steps_per_execution = sys.maxsize
    iterator._get_iterator = lambda: passes
    try:
        for _ in range(epochs):
            steps = iterator._enumerate_iterator()
            next(steps, None)
            if iterator.num_batches:
                next(steps, None)
            else:
                # Of an unknown number.
                steps.close()
                iterator.data_adapter.on_epoch_end()
    finally:
        iterator.steps_per_execution, iterator._current_iterator = several, None
        del iterator._get_iterator
    _begin_passes(iterator._get_iterator(), passes.count)


def _begin_passes(data: Any, count: int) -> None:
    """Begins a number of passes over data, and reads nothing in them.

    `shuffle`, and whatever else draws a new order for each epoch, draws it when the iterator is
    opened. TensorFlow opens all of them within one: each made in Python takes 10 ms.
    """
    if isinstance(data, iterator_release.Dataset):
        data = data.of
    # In a process of its own, a worker has one.
    shares = getattr(data, "_cloned_datasets", None) or getattr(data, "_datasets", None) or [data]
    if len(shares) > 1 or not isinstance(shares[0], tf.data.Dataset):
        for _ in range(count):
            iter(data)
        return
    # Its input is begun, too, and asked for nothing.
    unread = tf.data.Dataset.choose_from_datasets(shares, tf.data.Dataset.range(0))
    passes = tf.data.Dataset.range(count).flat_map(lambda _: unread)
    options = tf.data.Options()
    # Each would write out the data's graph, and the arrays in it.
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    for _ in passes.with_options(options):
        pass


class _Passes:
    """In the place of data: counts the passes over them."""

    count = 0

    def __iter__(self) -> Iterator[Any]:
        self.count += 1
        return iter(())


def _draw(of_epoch: Any, count: int) -> None:
    if isinstance(of_epoch, (tf.data.Iterator, tf.distribute.DistributedIterator)):
        _draw_in_graph(of_epoch, count)
        return
    for _ in range(count):
        next(of_epoch, None)


def _draw_all(of_epoch: tf.data.Iterator | tf.distribute.DistributedIterator, count: int) -> None:
    def body(number: tf.Tensor) -> tuple[tf.Tensor]:
        # Not an error if it has ended: of `steps_per_execution`, the last may be fewer.
        of_epoch.get_next_as_optional()
        return (number + 1,)

    tf.while_loop(lambda number: number < count, body, [0])


_draw_in_graph = tf.function(_draw_all, autograph=False, reduce_retracing=True)


# Layout of batches in a backup's data, compared with that of the resumed data.


_BATCHES, _SIZE, _LAST, _STEPS = "batches", "batch_size", "rows_of_last_batch", "steps_per_epoch"


def layout_of(iterator: Any) -> dict[str, int | None]:
    """Numbers of batches and rows of an epoch, independent of the number of workers."""
    adapter = iterator.data_adapter
    if isinstance(adapter, UnknownLength):
        adapter = adapter.of
    found = {
        _BATCHES: adapter.num_batches,
        _SIZE: adapter.batch_size,
        _LAST: _rows_of_last_batch(adapter),
        _STEPS: iterator.steps_per_epoch,
    }
    return {name: None if count is None else int(count) for name, count in found.items()}


def _rows_of_last_batch(adapter: data_adapter.DataAdapter) -> int | None:
    try:
        rows: int | None = adapter.partial_batch_size
        return rows
    except NotImplementedError:
        return None  # Keras does not say it of PyDatasets and generators.


def check(iterator: Any, saved: dict[str, int | None], epoch: int, batch: int) -> None:
    """Checks that training resumes with the same data, and logs differences.

    Args:
        saved: What `layout_of` has returned for the data of the backup.
        epoch, batch: Where training goes on.

    Raises:
        ValueError: If that is in the middle of an epoch that has other batches.
    """
    own = layout_of(iterator)
    changed = [name for name in own if own[name] != saved.get(name, own[name])]
    if not changed:
        return
    differing = ", ".join(f"{name}={own[name]} for {saved[name]}" for name in changed)
    if batch:
        raise ValueError(
            f"The backup was made after {batch} batches of an epoch, and the data come in other "
            "batches now: some rows of this epoch would be trained twice, or not at all. Start the "
            "job again with the data and the batch size that it had, or delete the backup. "
            f"Received: {differing} in the backup"
        )
    logger.warning(
        "training goes on at epoch %d of a backup that was made with other data or another batch "
        "size. Received: %s in the backup",
        epoch + 1,
        differing,
    )
