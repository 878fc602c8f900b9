"""Rows as they were at a moment, read in parts while updates go on.

    row       0 .. cursor - 1      cursor .. end
              read                 not yet: an update that is about to change one keeps the old one

A row that has been updated since is known by the number of its last update.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from keras_psplus.tables.keys import FREE
from keras_psplus.tables.rows.chunks import ChunkedRows
from keras_psplus.tables.rows.graphs import places_of

_INT = tf.int32
_LONG = tf.int64
_CLOSED = _INT.max
# More than are kept until all is read.
_MOST_KEPT = 1 << 20

# Entries, as `KeyRows.entries` has them, and the rows of all columns, one beside the other.
Part: TypeAlias = tuple[np.ndarray, np.ndarray]


class _Rows(Protocol):
    """`KeyRows`."""

    next: tf.Variable
    others: list[ChunkedRows]

    def keys(self, rows: tf.Tensor) -> tf.Tensor: ...

    def last(self, rows: tf.Tensor) -> tf.Tensor: ...

    def entries_of(self, rows: tf.Tensor) -> tf.Tensor: ...


class FrozenRows:
    """Rows that updates in a range were the last ones to change.

    `freeze`, `keep` and `read` may be called in graphs. None of them may run beside another.

    Args:
        of: `KeyRows`.
    """

    def __init__(self, of: _Rows) -> None:
        self._of = of
        with tf.init_scope(), tf.device("/CPU:0"):
            # The last one is the number of the moment.
            self._since, self._until, self._cursor, self._moment = (
                tf.Variable(value, dtype=_INT, trainable=False) for value in (-1, 0, _CLOSED, 0)
            )
            self._kept = tf.queue.FIFOQueue(_MOST_KEPT, [_INT, _LONG, tf.float32])

    def freeze(self, since: tf.Tensor, until: tf.Tensor) -> tf.Tensor:
        """Begins to keep rows, of updates after one up to the last.

        Args:
            since: The one, -1 for all.
            until: The last.

        Returns:
            The end of the rows.
        """
        self._since.assign(tf.cast(since, _INT), read_value=False)
        self._until.assign(tf.cast(until, _INT), read_value=False)
        self._cursor.assign(0, read_value=False)
        self._moment.assign_add(1, read_value=False)
        return self._of.next.read_value()

    def keep(self, rows: tf.Tensor) -> None:
        """Keeps int32 rows, about to change, that are not read yet; -1 is none."""
        cursor = self._cursor.read_value()
        tf.cond(cursor < _CLOSED, lambda: self._keep(rows, cursor), lambda: 0)

    def _keep(self, rows: tf.Tensor, cursor: tf.Tensor) -> int:
        rows = tf.gather(rows, places_of(rows >= cursor))
        rows = tf.gather(rows, places_of(self._counts(rows)))

        def put() -> int:
            self._kept.enqueue((self._moment.read_value(), *self._contents(rows)))
            return 0

        tf.cond(tf.size(rows) > 0, put, lambda: 0)
        return 0

    def read(self, first: tf.Tensor, end: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads a range of rows, the next one; returns those that count."""
        rows = tf.range(first, end)
        found = self._contents(tf.gather(rows, places_of(self._counts(rows))))
        with tf.control_dependencies(found):
            self._cursor.assign(end, read_value=False)
        return found

    def take_kept(self) -> Iterator[Part]:
        """Takes what updates have kept so far."""
        moment = int(self._moment)
        for _ in range(int(self._kept.size())):
            number, entries, values = self._kept.dequeue()
            # An update that went on while the last moment's rows were closed may have kept some.
            if number == moment:
                yield entries.numpy(), values.numpy()

    def thaw(self) -> None:
        """Keeps nothing any more."""
        self._cursor.assign(_CLOSED)
        for _ in self.take_kept():
            pass

    def _counts(self, rows: tf.Tensor) -> tf.Tensor:
        last = self._of.last(rows)
        is_in_range = tf.logical_and(last > self._since, last <= self._until)
        return tf.logical_and(is_in_range, tf.not_equal(self._of.keys(rows), FREE))

    def _contents(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        columns = [column.sparse_read(rows) for column in self._of.others]
        values = tf.concat(columns, 1) if columns else tf.zeros([tf.size(rows), 0])
        return self._of.entries_of(rows), values
