"""Row numbers of keys, in TensorFlow's dense hash tables.

A table that is full doubles, and moves all of its keys, some 15 million a second. So there are
many, by the highest bits of a key's hash, and each of them is full at another number of keys: they
never grow together.

    part        0      1      2     ...     63
    full at   0.90   0.89   0.88    ...    0.45  of its buckets
"""

import tensorflow as tf

from keras_psplus.tables.keys import DELETED, FREE, mixed, part_of
from keras_psplus.tables.rows.chunks import traced_once

PARTS = 64
_BUCKETS = 1 << 10
_FULLEST = [0.9 * 2 ** (-i / PARTS) for i in range(PARTS)]
# Keys that one update moves so that parts lose the marks of removed ones; each part counts as some.
_MOST_MOVED, _LEAST_MOVED = 1 << 16, 1 << 11
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
                    max_load_factor=fullest,
                )
                for fullest in _FULLEST
            ]
            # Removed keys of each part, and how many it may have before somebody looks.
            self._removed = tf.Variable(tf.zeros([PARTS], _INT), trainable=False)
            full = tf.constant([int(_BUCKETS * fullest) for fullest in _FULLEST])
            self._limits = tf.Variable(_most_removed(full), trainable=False)
        hashes, rows = tf.TensorSpec([None], _LONG), tf.TensorSpec([None], _INT)
        self._find_all = traced_once(self._find, hashes)
        self._insert_all = traced_once(self._insert, hashes, rows)
        self._remove_all = traced_once(self._remove, hashes)
        self._clear_all = traced_once(self._clear)
        # By itself: TensorFlow makes it ready when it is first needed, which few tables come to.
        self._rewrite_all = traced_once(self._rewrite, tf.TensorSpec([PARTS], _INT))
        one = tf.TensorSpec([], tf.resource)
        self._write_again = traced_once(self._write_if_due, one, tf.TensorSpec([], tf.bool))
        # By itself, with a size that is no constant: a table takes the memory of what it imports,
        # and TensorFlow would make equal tensors one, or a constant.
        self._import_empty = traced_once(self._import, one, tf.TensorSpec([], _INT))

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
                tf.reduce_any(removed > self._limits),
                lambda: self._rewrite_all(removed),
                lambda: removed,
            )

    def clear(self) -> None:
        """Removes all."""
        self._clear_all()

    def _clear(self) -> tf.Tensor:
        for table in self._tables:
            self._import_empty(table, tf.constant(_BUCKETS))
        return self._removed.assign(tf.zeros([PARTS], _INT), read_value=True)

    def _rewrite(self, removed: tf.Tensor) -> tf.Tensor:
        """Writes parts again without marks of removed keys.

        Searches for a key that is not there end at a bucket that never had one. New keys take
        buckets with marks as well as those, of which none would be left in the end.
        """
        sizes = [tf.raw_ops.LookupTableSizeV2(table_handle=table) for table in self._tables]
        left, limits = tf.cast(tf.stack(sizes), _INT), self._limits.read_value()
        limits = tf.where(removed > limits, _most_removed(left), limits)
        is_over, order = removed > limits, tf.argsort(-removed)
        costs = tf.gather(tf.where(is_over, tf.maximum(left, _LEAST_MOVED), 0), order)
        has_turn = tf.cumsum(costs, exclusive=True) < _MOST_MOVED
        is_due = tf.logical_and(is_over, tf.gather(has_turn, tf.argsort(order)))
        for table, due in zip(self._tables, tf.unstack(is_due)):
            self._write_again(table, due)
        self._limits.assign(limits, read_value=False)
        return self._removed.assign(tf.where(is_due, 0, removed), read_value=True)

    def _write_if_due(self, table: tf.Tensor, is_due: tf.Tensor) -> tf.Tensor:
        def write() -> tf.Tensor:
            keys, rows = (
                tf.reshape(of, [-1])
                for of in tf.raw_ops.LookupTableExportV2(
                    table_handle=table, Tkeys=_LONG, Tvalues=_INT
                )
            )
            is_key = tf.logical_and(keys != self._empty, keys != self._deleted)
            self._import_empty(table, tf.size(keys))
            tf.raw_ops.LookupTableInsertV2(
                table_handle=table,
                keys=tf.boolean_mask(keys, is_key),
                values=tf.boolean_mask(rows, is_key),
            )
            return tf.size(keys)

        return tf.cond(is_due, write, lambda: 0)

    def _import(self, table: tf.Tensor, buckets: tf.Tensor) -> tf.Tensor:
        """Has a table have so many buckets without keys."""
        # It wants matrices, and says vectors in its signature.
        keys, values = (
            tf.raw_ops.PlaceholderWithDefault(input=of, shape=tf.TensorShape(None))
            for of in (tf.fill([buckets, 1], self._empty), tf.zeros([buckets, 1], _INT))
        )
        tf.raw_ops.LookupTableImportV2(table_handle=table, keys=keys, values=values)
        return buckets

    def _split(self, hashes: tf.Tensor, *others: tf.Tensor) -> list[list[tf.Tensor]]:
        parts = part_of(tf.bitcast(hashes, tf.uint64), PARTS)
        return [tf.dynamic_partition(values, parts, PARTS) for values in (hashes, *others)]


def hashes_of(keys: tf.Tensor) -> tf.Tensor:
    """int64 hashes of keys, no two of which are equal."""
    return tf.bitcast(mixed(keys), _LONG)


def _most_removed(keys: tf.Tensor) -> tf.Tensor:
    """Half of the buckets without a key, at least, in parts with so many keys."""
    buckets = tf.constant([_BUCKETS << i for i in range(31 - _BUCKETS.bit_length())])
    full = tf.cast(buckets, tf.float64) * tf.constant(_FULLEST, tf.float64)[:, tf.newaxis]
    doubled = tf.cast(tf.cast(keys, tf.float64)[:, tf.newaxis] > full, _INT)
    return (tf.gather(buckets, tf.reduce_sum(doubled, 1)) - keys) // 2
