"""Destroys the iterators of datasets in separate threads.

Destroying an iterator of tf.data waits for its autotuning thread, which looks only every so often
whether it is to end: up to its period, which grows with the iterator's age to 60 s. (The thread is
woken by the cancellation, asks whether it has been cancelled before that is noted, and sleeps on:
`Model::OptimizeLoop` in TensorFlow's tensorflow/core/framework/model.cc.) Iterators are parts of
reference cycles, so Python's garbage collector destroys them in whichever thread it happens to run.
In a thread that trains, all other workers would wait for this one in their next collective.

A process does not wait for that when it ends. What a thread then destroys must not need Python any
more: TensorFlow ends a process (exit code 134) in which a thread asks for the interpreter's lock
while the interpreter ends, as for the Python stacks of a function that nothing else refers to.
"""

import atexit
import ctypes
import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_psplus.tf_internals import context

_LOOK_SECONDS = 0.5
# A process that ends does not wait longer than this for what is still being destroyed.
_EXIT_SECONDS = 5.0
# What `sys.getrefcount` says of an object that only a list has: the list's reference and its own.
_UNUSED = 2


class Dataset:
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
        _releaser.add(_handles(iterator), (dataset, _functions(iterator)))


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
    """Looks now and then which iterators nobody uses any more.

    Attributes:
        kept: The iterators that have not been released.
    """

    def __init__(self) -> None:
        self.kept: list[_Kept] = []
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


def _are_unused(handles: list[tf.Tensor]) -> bool:
    # By indices: a loop over the values would be one more reference.
    return all(sys.getrefcount(handles[i]) == _UNUSED for i in range(len(handles)))


_releaser = _Releaser()
atexit.register(_releaser.leave)
