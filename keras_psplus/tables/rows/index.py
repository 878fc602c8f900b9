"""Row numbers of keys, in TensorFlow's dense hash tables.

A table that is full doubles, and moves all of its keys. So there are several, by the highest bits
of a key's hash, and each of them is full at another number of keys: they never grow together.

    part        0      1      2     ...     15
    full at   0.90   0.86   0.82    ...    0.47  of its buckets
"""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.tables.keys import DELETED, FREE, mixed, part_of
from keras_psplus.tables.rows.chunks import traced_once

PARTS = 16
_BUCKETS = 1 << 10
_FULLEST = 0.9
# Of removed keys, before a part is written again without them.
_LEAST_REMOVED = 1 << 10
_INT, _LONG = tf.int32, tf.int64


class KeyIndex:
    """Maps hashes of keys to row numbers; its methods may be called in graphs."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("/CPU:0"):
            empty, deleted = tf.unstack(hashes_of(tf.constant([FREE, DELETED], _LONG)))
            self._empty, self._deleted = empty, deleted
            self._tables = [
                tf.raw_ops.AnonymousMutableDenseHashTable(
                    empty_key=empty,
                    deleted_key=deleted,
                    value_dtype=_INT,
                    value_shape=[],
                    initial_num_buckets=_BUCKETS,
                    max_load_factor=_FULLEST * 2 ** (-i / PARTS),
                )
                for i in range(PARTS)
            ]
            self._removed = tf.Variable(tf.zeros([PARTS], _INT), trainable=False)
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

    def _find(self, hashes: tf.Tensor) -> tf.Tensor:
        parts, places = self._split(hashes, tf.range(tf.size(hashes)))
        found = [
            tf.raw_ops.LookupTableFindV2(
                table_handle=table, keys=part, default_value=tf.constant(-1, _INT)
            )
            for table, part in zip(self._tables, parts)
        ]
        return tf.dynamic_stitch(places, found)

    def _insert(self, hashes: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        for table, part, values in zip(self._tables, *self._split(hashes, rows)):
            tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=part, values=values)
        return tf.size(hashes)

    def _remove(self, hashes: tf.Tensor) -> tf.Tensor:
        (parts,) = self._split(hashes)
        done = [
            tf.raw_ops.LookupTableRemoveV2(table_handle=table, keys=part)
            for table, part in zip(self._tables, parts)
        ]
        counts = tf.stack([tf.size(part) for part in parts])
        removed = self._removed.assign_add(counts, read_value=True)
        with tf.control_dependencies(done):
            return tf.cond(
                tf.reduce_any(removed > _LEAST_REMOVED),
                lambda: tf.numpy_function(self._rewrite_worst, [removed], _INT),
                lambda: tf.constant(0, _INT),
            )

    def clear(self) -> None:
        """Removes all."""
        for table in self._tables:
            self._import_empty(table, _BUCKETS)
        self._removed.assign(tf.zeros([PARTS], _INT))

    def _rewrite_worst(self, removed: np.ndarray) -> np.int32:
        # A removed key leaves a mark, over which searches go on; nothing else takes the marks away.
        worst = int(removed.argmax())
        table = self._tables[worst]
        left = int(tf.raw_ops.LookupTableSizeV2(table_handle=table))
        if removed[worst] > max(_LEAST_REMOVED, left // 4):
            keys, values = tf.raw_ops.LookupTableExportV2(
                table_handle=table, Tkeys=_LONG, Tvalues=_INT
            )
            keys, values = tf.reshape(keys, [-1]), tf.reshape(values, [-1])
            is_key = tf.logical_and(keys != self._empty, keys != self._deleted)
            self._import_empty(table, tf.size(keys))
            tf.raw_ops.LookupTableInsertV2(
                table_handle=table,
                keys=tf.boolean_mask(keys, is_key),
                values=tf.boolean_mask(values, is_key),
            )
            self._removed.assign(np.where(np.arange(PARTS) == worst, 0, removed))
        return np.int32(left)

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
        parts = part_of(tf.bitcast(hashes, tf.uint64), PARTS)
        return [tf.dynamic_partition(values, parts, PARTS) for values in (hashes, *others)]


def hashes_of(keys: tf.Tensor) -> tf.Tensor:
    """int64 hashes of keys, no two of which are equal."""
    return tf.bitcast(mixed(keys), _LONG)
