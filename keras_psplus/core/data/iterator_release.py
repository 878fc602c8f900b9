"""Destroys the iterators of datasets in separate threads.

Destroying an iterator of tf.data waits for its autotuning thread, which looks only every so often
whether it is to end: up to its period, which grows with the iterator's age to 60 s. (The thread is
woken by the cancellation, asks whether it has been cancelled before that is noted, and sleeps on:
`Model::OptimizeLoop` in TensorFlow's tensorflow/core/framework/model.cc.) Iterators are parts of
reference cycles, so Python's garbage collector destroys them in whichever thread it happens to run.
In a thread that trains, all other workers would wait for this one in their next collective.
"""

import atexit
import ctypes
import gc
import sys
import threading
import time
import weakref
from typing import Any

import tensorflow as tf

_LOOK_SECONDS = 0.5
# A process that ends does not wait longer than this for what is still being destroyed.
_EXIT_SECONDS = 5.0
# What `sys.getrefcount` says of an object that only a list has: the list's reference and its own.
_UNUSED = 2


class Dataset:
    """A dataset whose iterators are destroyed in separate threads.

    Attributes:
        of: That dataset.
    """

    def __init__(self, dataset: tf.data.Dataset | tf.distribute.DistributedDataset) -> None:
        self.of = dataset

    def __iter__(self) -> tf.data.Iterator | tf.distribute.DistributedIterator:
        iterator = iter(self.of)
        release_elsewhere(iterator)
        return iterator

    @property
    def element_spec(self) -> Any:
        return self.of.element_spec


def release_elsewhere(iterator: Any) -> None:
    """Destroys an iterator's resources in a thread once nothing else uses them.

    Args:
        iterator: A `tf.data.Iterator` or `tf.distribute.DistributedIterator`; others are left
            alone.
    """
    if isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
        _releaser.add(_handles(iterator))


def _handles(iterator: tf.data.Iterator | tf.distribute.DistributedIterator) -> list[tf.Tensor]:
    """The tensors by which Python keeps an iterator alive."""
    handles = list(tf.nest.flatten(iterator, expand_composites=True))
    for of_worker in getattr(iterator, "_iterators", ()):
        # Datasets of TensorFlow's that belong to this iterator, and refer to the one on the host.
        for of_device in getattr(of_worker._iterator, "_device_iterators", ()):
            datasets = [of_device._dataset]
            while datasets:
                dataset = datasets.pop()
                handles.append(dataset._variant_tensor)
                datasets += dataset._inputs()
    return list({id(handle): handle for handle in handles}.values())


class _Releaser:
    """Looks now and then which iterators nobody uses any more.

    Attributes:
        kept: Lists of the handles of each iterator that has not been released.
    """

    def __init__(self) -> None:
        self.kept: list[list[Any]] = []
        self._lock = threading.Lock()
        self._is_running = False
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def add(self, handles: list[tf.Tensor]) -> None:
        """Keeps the handles of one more iterator."""
        with self._lock:
            self.kept.append(handles)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="iterator release", daemon=True).start()

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
        for handles in [handles for handles in self.kept if _are_unused(handles)]:
            self._destroy(handles)

    def _destroy(self, handles: list[tf.Tensor]) -> None:
        self.kept = [others for others in self.kept if others is not handles]
        thread = threading.Thread(target=handles.clear, name="iterator end", daemon=True)
        self._threads.add(thread)
        thread.start()

    def leave(self) -> None:
        """Destroys what is left, as the process ends, and waits a little for it.

        What something still refers to is left to the end of the process: Python would destroy it
        in its main thread, one iterator after the other.
        """
        gc.collect()
        with self._lock:
            for handles in list(self.kept):
                if _are_unused(handles):
                    self._destroy(handles)
                else:
                    for handle in handles:
                        ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))
        end = time.monotonic() + _EXIT_SECONDS
        for thread in list(self._threads):
            thread.join(max(0.0, end - time.monotonic()))


def _are_unused(handles: list[tf.Tensor]) -> bool:
    # By indices: a loop over the values would be one more reference.
    return all(sys.getrefcount(handles[i]) == _UNUSED for i in range(len(handles)))


_releaser = _Releaser()
atexit.register(_releaser.leave)
