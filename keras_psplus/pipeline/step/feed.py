"""Prefetching of batches to the stages that need them, during the previous step."""

from __future__ import annotations

import concurrent.futures
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.core.jobs import background
from keras_psplus.keras_internals.keras_parts import tree

_ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator)


class Feed:
    """Draws batches, and sends each to its devices before it is asked for.

    Args:
        send: Function of a batch and of whether tensors are to tell its number of rows. It returns
            the batch on other devices.
    """

    def __init__(self, send: Callable[[Any, bool], Any]) -> None:
        self._send = send
        self._iterator: Callable[[], Any] = lambda: None
        self._next: concurrent.futures.Future[Any] | None = None

    def batches(self, iterator: Any, most: int) -> Iterator[tuple[Any, bool]]:
        """Yields batches of an iterator, and whether tensors are to tell their numbers of rows.

        Args:
            iterator: Iterator over the data of an epoch.
            most: How many batches there are at most.
        """
        if not is_ahead(iterator):
            # One batch that the script has given.
            for _, batch in zip(range(most), iterator):
                yield as_tensors(batch), True
            return
        if self._iterator() is not iterator:
            # It is not kept alive by this: it may hold much of the data.
            self._iterator = weakref.ref(iterator, self._forget)
            self._next = None
        shows_rows = _shows_rows(iterator)
        for _ in range(most):
            ahead = self._next or self._draw(iterator, shows_rows)
            batch = ahead.result()
            self._next = None
            if batch is None:
                return
            self._next = self._draw(iterator, shows_rows)
            yield batch, shows_rows

    def _forget(self, reference: Callable[[], Any]) -> None:
        if self._iterator is reference:
            self._next = None

    def _draw(self, iterator: Iterator[Any], shows_rows: bool) -> concurrent.futures.Future[Any]:
        def draw() -> Any:
            try:
                return self._send(as_tensors(next(iterator)), shows_rows)
            except (StopIteration, tf.errors.OutOfRangeError):
                return None

        return background.start(draw, "pipeline feed")


def is_ahead(iterator: Any) -> bool:
    """Whether batches of an iterator are drawn before they are asked for."""
    return isinstance(iterator, _ITERATORS)


def as_tensors(batch: Any) -> Any:
    """A batch with tensors in the place of arrays."""
    return tree.map_structure(
        lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, batch
    )


def _shows_rows(iterator: Any) -> bool:
    """Whether all batches of an iterator have the same number of rows, which it knows."""
    leaves = tree.flatten(iterator.element_spec)
    shapes = (leaf.shape for leaf in leaves if hasattr(leaf, "shape"))
    return next((shape[0] for shape in shapes if shape.rank), None) is not None
