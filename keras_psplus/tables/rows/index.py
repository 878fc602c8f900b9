"""Row numbers of keys, in TensorFlow's dense hash tables.

A table that is full doubles, and moves all of its keys, some 15 million a second. So there are
many, by the highest bits of a key's hash, and each of them is full at another number of keys: they
never grow together.

    part        0      1      2     ...     63
    full at   0.90   0.89   0.88    ...    0.45  of its buckets

A search in many costs most of its time for the operations, and a model may have many small tables:
the first keys are in one part, and move to the many once there are more.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.tables.keys import DELETED, FREE, mixed, part_of
from keras_psplus.tables.rows.chunks import traced_once

PARTS = 64
_BUCKETS = 1 << 10
# Keys of the one part, which move in some 20 ms.
_MOST_OF_ONE = 1 << 17
# Keys that one update moves so that parts lose the marks of removed ones; each part counts as some.
_MOST_MOVED, _LEAST_MOVED = 1 << 16, 1 << 11
_INT, _LONG = tf.int32, tf.int64


class _Parts:
    """Hash tables that share out the keys by their hashes.

    Args:
        count: Number of tables, a power of two.
        empty, deleted: Hashes of no key.
    """

    def __init__(self, count: int, empty: tf.Tensor, deleted: tf.Tensor) -> None:
        self._count, self._empty, self._deleted = count, empty, deleted
        self._fullest = [0.9 * 2 ** (-i / count) for i in range(count)]
        self._tables = [
            tf.raw_ops.AnonymousMutableDenseHashTable(
                empty_key=empty,
                deleted_key=deleted,
                value_dtype=_INT,
                value_shape=[],
                initial_num_buckets=_BUCKETS,
                max_load_factor=fullest,
            )
            for fullest in self._fullest
        ]
        # Removed keys of each part, and how many it may have before somebody looks.
        self._removed = tf.Variable(tf.zeros([count], _INT), trainable=False)
        self._limits = tf.Variable(
            [_most_removed(fullest, int(_BUCKETS * fullest)) for fullest in self._fullest],
            dtype=_INT,
            trainable=False,
        )

    def find(self, hashes: tf.Tensor) -> tf.Tensor:
        parts, places = self._split(hashes, tf.range(tf.size(hashes)))
        found = [
            tf.raw_ops.LookupTableFindV2(
                table_handle=table, keys=part, default_value=tf.constant(-1, _INT)
            )
            for table, part in zip(self._tables, parts)
        ]
        return found[0] if self._count == 1 else tf.dynamic_stitch(places, found)

    def insert(self, hashes: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        for table, part, values in zip(self._tables, *self._split(hashes, rows)):
            tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=part, values=values)
        return tf.size(hashes)

    def remove(self, hashes: tf.Tensor) -> tf.Tensor:
        (parts,) = self._split(hashes)
        done = [
            tf.raw_ops.LookupTableRemoveV2(table_handle=table, keys=part)
            for table, part in zip(self._tables, parts)
        ]
        counts = tf.stack([tf.size(part) for part in parts])
        removed = self._removed.assign_add(counts, read_value=True)
        with tf.control_dependencies(done):
            return tf.cond(
                tf.reduce_any(removed > self._limits),
                lambda: tf.numpy_function(self._rewrite, [removed, self._limits], _INT),
                lambda: tf.constant(0, _INT),
            )

    def clear(self) -> None:
        """Removes all."""
        for table in self._tables:
            self._import_empty(table, _BUCKETS)
        self._removed.assign(tf.zeros([self._count], _INT))

    def _rewrite(self, removed: np.ndarray, limits: np.ndarray) -> np.int32:
        """Writes parts again without marks of removed keys.

        Searches for a key that is not there end at a bucket that never had one. New keys take
        buckets with marks as well as those, of which none would be left in the end.
        """
        removed, limits, moved = removed.copy(), limits.copy(), 0
        for i in np.argsort(-removed):
            table = self._tables[i]
            if removed[i] > limits[i] and moved < _MOST_MOVED:
                left = int(tf.raw_ops.LookupTableSizeV2(table_handle=table))
                limits[i] = _most_removed(self._fullest[i], left)
                if removed[i] > limits[i]:
                    self._write_again(table)
                    removed[i] = 0
                    moved += max(left, _LEAST_MOVED)
        self._removed.assign(removed)
        self._limits.assign(limits)
        return np.int32(moved)

    def _write_again(self, table: Any) -> None:
        keys, values, buckets = self._contents(table)
        self._import_empty(table, buckets)
        tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=keys, values=values)

    def contents(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Hashes and row numbers of all keys."""
        hashes, rows, _ = zip(*map(self._contents, self._tables))
        return tf.concat(hashes, 0), tf.concat(rows, 0)

    def _contents(self, table: Any) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Hashes and row numbers of a table's keys, and its number of buckets."""
        hashes, rows = (
            tf.reshape(of, [-1])
            for of in tf.raw_ops.LookupTableExportV2(table_handle=table, Tkeys=_LONG, Tvalues=_INT)
        )
        is_key = tf.logical_and(hashes != self._empty, hashes != self._deleted)
        return tf.boolean_mask(hashes, is_key), tf.boolean_mask(rows, is_key), tf.size(hashes)

    def _import_empty(self, table: Any, buckets: Any) -> None:
        # An import takes the place of the buckets as it is.
        keys, values = tf.fill([buckets, 1], self._empty), tf.zeros([buckets, 1], _INT)
        # It wants matrices, and says vectors in its signature.
        if not tf.executing_eagerly():
            keys, values = (
                tf.raw_ops.PlaceholderWithDefault(input=of, shape=tf.TensorShape(None))
                for of in (keys, values)
            )
        tf.raw_ops.LookupTableImportV2(table_handle=table, keys=keys, values=values)

    def _split(self, hashes: tf.Tensor, *others: tf.Tensor) -> list[list[tf.Tensor]]:
        if self._count == 1:
            return [[hashes], *([other] for other in others)]
        parts = part_of(tf.bitcast(hashes, tf.uint64), self._count)
        return [tf.dynamic_partition(values, parts, self._count) for values in (hashes, *others)]


class KeyIndex:
    """Maps hashes of keys to row numbers; its methods may be called in graphs."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("/CPU:0"):
            empty, deleted = tf.unstack(hashes_of(tf.constant([FREE, DELETED], _LONG)))
            self._one, self._many = _Parts(1, empty, deleted), _Parts(PARTS, empty, deleted)
            # Keys that were added since all were removed; and whether they have moved.
            self._added = tf.Variable(0, dtype=_INT, trainable=False)
            self._has_moved = tf.Variable(False, trainable=False)
        hashes, rows = tf.TensorSpec([None], _LONG), tf.TensorSpec([None], _INT)
        self._find_all = traced_once(self._find, hashes)
        self._insert_all = traced_once(self._insert, hashes, rows)
        self._remove_all = traced_once(self._remove, hashes)

    def find(self, hashes: tf.Tensor) -> tf.Tensor:
        """int32 row numbers of an int64 vector of hashes; -1 where there is none."""
        return tf.ensure_shape(self._find_all(hashes), [None])

    def insert(self, hashes: tf.Tensor, rows: tf.Tensor) -> None:
        """Adds hashes that are not there, with their row numbers."""
        self._insert_all(hashes, rows)

    def remove(self, hashes: tf.Tensor) -> None:
        """Removes hashes that are there."""
        self._remove_all(hashes)

    def clear(self) -> None:
        """Removes all."""
        self._one.clear()
        self._many.clear()
        self._added.assign(0)
        self._has_moved.assign(False)

    def _find(self, hashes: tf.Tensor) -> tf.Tensor:
        moved = self._has_moved.read_value()
        return tf.cond(moved, lambda: self._many.find(hashes), lambda: self._one.find(hashes))

    def _insert(self, hashes: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        moved, added = self._has_moved.read_value(), tf.size(hashes)
        # Once it has moved, no more is counted.
        added = self._added.assign_add(tf.where(moved, 0, added), read_value=True)

        def more() -> tf.Tensor:
            tf.cond(moved, lambda: 0, lambda: self._many.insert(*self._one.contents()))
            self._has_moved.assign(True, read_value=False)
            return self._many.insert(hashes, rows)

        is_large = tf.logical_or(moved, added > _MOST_OF_ONE)
        return tf.cond(is_large, more, lambda: self._one.insert(hashes, rows))

    def _remove(self, hashes: tf.Tensor) -> tf.Tensor:
        moved = self._has_moved.read_value()
        return tf.cond(moved, lambda: self._many.remove(hashes), lambda: self._one.remove(hashes))


def hashes_of(keys: tf.Tensor) -> tf.Tensor:
    """int64 hashes of keys, no two of which are equal."""
    return tf.bitcast(mixed(keys), _LONG)


def _most_removed(fullest: float, keys: int) -> int:
    """Half of the buckets without a key in a part with so many, at least."""
    buckets = _BUCKETS
    while keys > buckets * fullest:
        buckets *= 2
    return (buckets - keys) // 2
