"""Epochs of `fit`'s data: the position in them, their steps, and their iterators."""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.cluster.process.warm_server import flush_files
from keras_psplus.datasets import check_job_gave_rows
from keras_psplus.keras_internals.keras_parts import (
    data_adapter,
    epoch_iterator,
    tf_dataset_adapter,
)
from keras_psplus.log import logger
from keras_psplus.tf_internals import context

if TYPE_CHECKING:
    from keras_psplus.engine import Call


# Destroys the iterators of datasets in separate threads.
#
# Destroying an iterator of tf.data waits for its autotuning thread, which looks only every so often
# whether it is to end: up to its period, which grows with the iterator's age to 60 s. (The thread
# is woken by the cancellation, asks whether it has been cancelled before that is noted, and sleeps
# on: `Model::OptimizeLoop` in TensorFlow's tensorflow/core/framework/model.cc.) Iterators are parts
# of reference cycles, so Python's garbage collector destroys them in whichever thread it happens to
# run. In a thread that trains, all other workers would wait for this one in their next collective.
#
# A process does not wait for that when it ends. What a thread then destroys must not need Python
# any more: TensorFlow ends a process (exit code 134) in which a thread asks for the interpreter's
# lock while the interpreter ends, as for the Python stacks of a function that nothing else refers
# to.

_LOOK_SECONDS = 0.5
# A process that ends does not wait longer than this for what is still being destroyed.
_EXIT_SECONDS = 5.0
# `sys.getrefcount` of an object that only a list has: the list's reference and its own.
_UNUSED = 2


class ReleasedDataset:
    """A dataset whose iterators are destroyed in separate threads."""

    def __init__(self, dataset: tf.data.Dataset | tf.distribute.DistributedDataset) -> None:
        self.of = dataset

    def __iter__(self) -> tf.data.Iterator | tf.distribute.DistributedIterator:
        iterator = iter(self.of)
        release_elsewhere(iterator, self.of)
        return iterator

    @property
    def element_spec(self) -> Any:
        return self.of.element_spec


def release_elsewhere(iterator: Any, dataset: Any) -> None:
    """Destroys an iterator's resources in a thread once nothing else uses them.

    Args:
        iterator: A `tf.data.Iterator` or `tf.distribute.DistributedIterator`; others are left
            alone.
    """
    if isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
        releaser.add(_handles(iterator), (dataset, _functions(iterator)))


def _handles(iterator: tf.data.Iterator | tf.distribute.DistributedIterator) -> list[tf.Tensor]:
    """The tensors by which Python keeps an iterator alive."""
    handles = list(tf.nest.flatten(iterator, expand_composites=True))
    handles += [dataset._variant_tensor for dataset in _datasets_of_devices(iterator)]
    return list({id(handle): handle for handle in handles}.values())


def _datasets_of_devices(iterator: Any) -> Iterator[tf.data.Dataset]:
    """Datasets of TensorFlow's that belong to an iterator, and refer to its host's."""
    for of_worker in getattr(iterator, "_iterators", ()):
        for of_device in getattr(of_worker._iterator, "_device_iterators", ()):
            datasets = [of_device._dataset]
            while datasets:
                dataset = datasets.pop()
                yield dataset
                datasets += dataset._inputs()


def _functions(iterator: Any) -> list[Any]:
    """Functions that those datasets call, without what Python refers to by them."""
    left = [
        value.inference_fn
        for dataset in _datasets_of_devices(iterator)
        for value in vars(dataset).values()
        if isinstance(value, tf.types.experimental.ConcreteFunction)
    ]
    names = set()
    while left:
        function = left.pop()
        names.add(function.name)
        left += function.children
    return [context.context().get_c_function(name) for name in names]


class _Kept:
    """Handles of an iterator, and a thread that destroys it once that is asked for.

    The thread is started with the iterator: while the interpreter ends, none can be started.

    Attributes:
        others: What is to outlive the iterator.
    """

    def __init__(self, handles: list[Any], others: Any) -> None:
        self.handles, self.others = handles, others
        self._is_asked_for = threading.Event()
        self.thread = threading.Thread(target=self._run, name="iterator end", daemon=True)

    def _run(self) -> None:
        self._is_asked_for.wait()
        self.handles.clear()

    def destroy(self) -> None:
        """Begins to destroy the iterator."""
        self._is_asked_for.set()


class _Releaser:
    """Looks now and then which iterators nobody uses any more."""

    def __init__(self) -> None:
        self.kept: list[_Kept] = []
        # Whether the interpreter leaves objects as they are when it ends.
        self.spares_objects = False
        self._lock = threading.Lock()
        self._is_running = False
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def add(self, handles: list[Any], others: Any) -> None:
        """Keeps the handles of one more iterator, and what is to outlive it."""
        kept = _Kept(handles, others)
        with self._lock:
            try:
                if not self._is_running:
                    threading.Thread(target=self._run, name="iterator release", daemon=True).start()
                    self._is_running = True
                kept.thread.start()
            except RuntimeError:
                return  # The interpreter ends, or there are no more threads: Python destroys it.
            self.kept.append(kept)

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            with self._lock:
                self.release_unused()
                if not self.kept:
                    self._is_running = False
                    return

    def release_unused(self) -> None:
        """Begins to destroy the iterators that nobody else refers to."""
        for kept in [kept for kept in self.kept if _are_unused(kept.handles)]:
            self._destroy(kept)

    def _destroy(self, kept: _Kept) -> None:
        self.kept.remove(kept)
        self._threads.add(kept.thread)
        kept.destroy()

    def leave(self) -> None:
        """Destroys what is left, as the process ends, and waits a little for it.

        What something still refers to is left to the end of the process: Python would destroy it
        in its main thread, one iterator after the other.
        """
        gc.collect()
        with self._lock:
            self.release_unused()
            for kept in self.kept:
                for handle in kept.handles:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
        end = time.monotonic() + _EXIT_SECONDS
        for thread in list(self._threads):
            thread.join(max(0.0, end - time.monotonic()))
        if self.spares_objects:
            # Python would look for cycles among all objects, for over a second of a processor with
            # TensorFlow, while the first worker waits for the end of the others.
            flush_files()
            gc.freeze()


def _are_unused(handles: list[tf.Tensor]) -> bool:
    # By indices: a loop over the values would be one more reference.
    return all(sys.getrefcount(handles[i]) == _UNUSED for i in range(len(handles)))


releaser = _Releaser()
atexit.register(releaser.leave)


# Position in `fit`'s data, also in data whose number of steps is unknown.

# Data adapter for workers' separate data, whose number of steps is unknown.


class UnknownLength(data_adapter.DataAdapter):
    """A data adapter whose number of steps shows only when all workers have run out."""

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
        check_job_gave_rows(adapter.get_tf_dataset())


# Resumes `fit`'s data after the last trained batch.


def skip(iterator: Any, epochs: int, batches: int) -> None:
    """Advances an epoch iterator to a batch of an epoch.

    To be called when an iteration has begun. The data have the order of the first run, also when
    they are shuffled, because an iterator is opened for each earlier epoch here, too. Batches are
    read only where an epoch begins in the middle of the data (`steps_per_epoch`).
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
        # Begin again as Keras had begun.
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
    if isinstance(data, ReleasedDataset):
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
    """Checks that training resumes with the same data, and logs differences."""
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


# Epochs of Keras's iterator, as long as their data, or their rest.
#
# Keras counts the steps of the first epoch where data do not say how many they are, and takes no
# more in later ones. Data that come shuffled out over workers, or from a service, have another
# number in each epoch.


def make_without_data(call: Call) -> Any:
    """Runs the part of the constructor that reads no data; returns the iterator."""
    iterator, args, kwargs = call.owner, list(call.args), dict(call.kwargs)
    strategy = args.pop(0) if args else kwargs.pop("distribute_strategy", None)
    epoch_iterator.EpochIterator.__init__(iterator, *args, **kwargs)
    iterator._distribute_strategy = strategy
    return iterator


def begin_epochs(call: Call) -> Any:
    """Begins to iterate, and skips what was trained before."""
    result = call.proceed()
    engine: Any = call.engine
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
        check_rows_came(iterator.data_adapter)
    elif iterator.steps_per_epoch is None and iterator.data_adapter.num_batches is None:
        return None  # this is how data of unknown length end
    return call.proceed()


def end_progress(call: Call) -> None:
    """Leaves the progress bar without a number of steps if it had none."""
    has_no_target = call.owner.target is None
    call.proceed()
    if has_no_target:
        call.owner.target = None
