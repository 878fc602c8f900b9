"""Keys and the numbers of their rows, which are used again.

column    key      meta: frequency, last use, its time in seconds
row 0     17             5         812       1795702463
row 1     FREE                                            (on the stack of free rows)
"""

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from keras_psplus.tables.keys import FREE
from keras_psplus.tables.rows.chunks import MOST_ROWS, ChunkedRows
from keras_psplus.tables.rows.frozen_rows import FrozenRows
from keras_psplus.tables.rows.graphs import places_of, traced_once
from keras_psplus.tables.rows.index import KeyIndex, hashes_of
from keras_psplus.tables.rows.removal_log import RemovalLog

_INT, _LONG = tf.int32, tf.int64
FREQUENCY, LAST, SEEN = range(3)


class KeyRows:
    """Rows of keys, with each row's frequency and last use.

    Args:
        name: Name of the table, for messages.
        update: Function that returns the number of the update that goes on.
        *others: `ChunkedRows` that have as many rows.

    Attributes:
        others: As given.
        log: The keys that were removed.
        frozen: The rows as they were, while somebody reads them.
    """

    def __init__(self, name: str, update: Callable[[], tf.Tensor], *others: ChunkedRows) -> None:
        self._name, self._update = name, update
        self.index, self.log, self.frozen = KeyIndex(), RemovalLog(), FrozenRows(self)
        self._keys, self._meta, self._free = (
            ChunkedRows(columns, dtype) for columns, dtype in ((1, _LONG), (3, _INT), (1, _INT))
        )
        with tf.init_scope():
            self.next, self._free_count = (
                tf.Variable(0, dtype=_INT, trainable=False) for _ in range(2)
            )
        self.set_others(others)

    def set_others(self, others: Iterable[ChunkedRows]) -> None:
        """Sets the columns beside the keys."""
        self.others = list(others)
        rows = tf.TensorSpec([None], _INT)
        self._remove_rows = traced_once(self._remove_unless_empty, rows)
        self._keep_rows = traced_once(self.frozen.keep, rows)

    def count(self) -> tf.Tensor:
        """int32 scalar, how many rows have a key."""
        return self.next.read_value() - self._free_count.read_value()

    def keys(self, rows: tf.Tensor) -> tf.Tensor:
        """int64 keys of rows; `FREE` of those that have none."""
        return self._keys.sparse_read(rows)[:, 0]

    def meta(self, rows: tf.Tensor) -> tf.Tensor:
        """int32 matrix of frequencies, last uses and times of rows."""
        return self._meta.sparse_read(rows)

    def last(self, rows: tf.Tensor) -> tf.Tensor:
        """int32 numbers of the updates that rows were last used in."""
        return self.meta(rows)[:, LAST]

    def note(self, rows: tf.Tensor, frequency: tf.Tensor, last: Any, seen: Any) -> None:
        """Sets frequencies of rows, and one last use of all of them."""
        size = tf.shape(rows)
        self._meta.write(rows, tf.stack([frequency, tf.fill(size, last), tf.fill(size, seen)], 1))

    def add(self, keys: tf.Tensor, meta: tf.Tensor) -> tf.Tensor:
        """Gives rows to distinct keys that have none; returns the int32 row numbers."""
        count, free = tf.size(keys), self._free_count.read_value()
        reused = tf.minimum(count, free)
        first, fresh = self.next.read_value(), count - reused
        text = f"A server takes {MOST_ROWS} keys of '{self._name}'. Received: one more"
        tf.debugging.assert_less_equal(first, MOST_ROWS - fresh, text)
        taken = self._free.sparse_read(tf.range(free - reused, free))[:, 0]
        rows = tf.concat([taken, tf.range(first, first + fresh)], 0)
        self._free_count.assign_sub(reused, read_value=False)
        end = self.next.assign_add(fresh, read_value=True)
        for column in (self._keys, self._meta, *self.others):
            column.allocate(end)
        self.index.insert(hashes_of(keys), rows)
        self._keys.write(rows, keys[:, tf.newaxis])
        self._meta.write(rows, meta)
        return rows

    def remove(self, rows: tf.Tensor) -> None:
        """Takes distinct rows from their keys."""
        self._remove_rows(rows)

    def keep(self, rows: tf.Tensor) -> None:
        """Has `frozen` keep rows that are about to change; -1 is none."""
        self._keep_rows(rows)

    def remove_keys(self, keys: tf.Tensor) -> None:
        """Takes the rows from those of some distinct keys that have one."""
        rows = self.index.find(hashes_of(keys))
        self.remove(tf.gather(rows, places_of(rows >= 0)))

    def _remove_unless_empty(self, rows: tf.Tensor) -> None:
        tf.cond(tf.size(rows) > 0, lambda: self._remove(rows), lambda: 0)

    def _remove(self, rows: tf.Tensor) -> int:
        keys = self.keys(rows)
        self.log.note(keys, self._update())
        self.index.remove(hashes_of(keys))
        count, free = tf.size(rows), self._free_count.read_value()
        self.keep(rows)
        self._keys.write(rows, tf.fill([count, 1], tf.constant(FREE, _LONG)))
        self._free.allocate(free + count)
        self._free.write(tf.range(free, free + count), rows[:, tf.newaxis])
        self._free_count.assign_add(count, read_value=False)
        return 0

    def clear(self) -> None:
        """Removes all."""
        self.index.clear()
        self.next.assign(0)
        self._free_count.assign(0)

    def entries(self, first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """int64 matrix of a range's keys, frequencies, last uses and times."""
        return self.entries_of(tf.range(first, tf.minimum(first + count, self.next.read_value())))

    def entries_of(self, rows: tf.Tensor) -> tf.Tensor:
        """The same of a vector of row numbers."""
        meta = tf.cast(self.meta(rows), _LONG)
        return tf.concat([self.keys(rows)[:, tf.newaxis], meta], 1)

    def add_entries(self, entries: tf.Tensor) -> tf.Tensor:
        """Gives rows to keys as `entries` has returned them; returns the row numbers."""
        return self.add(entries[:, 0], tf.cast(entries[:, 1:], _INT))
