"""Row numbers of keys, in TensorFlow's dense hash tables.

A table that is full doubles, and moves all of its keys, some 15 million a second. So one table has
the first 262,144 keys. More are in many, by the highest bits of a key's hash, each of which is full
at another number of keys: they never grow together.

    table       0        1      2      3     ...     64
    has       few keys   or many, in parts
    full at    0.90     0.90   0.89   0.88   ...    0.45  of its buckets
"""

from collections.abc import Callable

import tensorflow as tf

from keras_psplus.tables.keys import DELETED, FREE, mixed, part_of
from keras_psplus.tables.rows.graphs import places_of, traced_once

PARTS = 64
_FEW = 1 << 18
_BUCKETS = 1 << 10
_FULLEST = [0.9, *(0.9 * 2 ** (-i / PARTS) for i in range(PARTS))]
# Keys that one update moves so that tables lose the marks of removed ones; each counts as some.
_MOST_MOVED, _LEAST_MOVED = 1 << 16, 1 << 11
_INT, _LONG = tf.int32, tf.int64


class KeyIndex:
    """Maps hashes of keys to row numbers; its methods may be called in graphs."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("/CPU:0"):
            empty, deleted = tf.unstack(_no_keys())
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
            # One tensor for functions and branches to take, instead of many.
            self._handles = tf.stack(self._tables)
            self._are_many = tf.Variable(False, trainable=False)
            # Removed keys of each table, and how many it may have before somebody looks.
            self._removed = tf.Variable(tf.zeros([1 + PARTS], _INT), trainable=False)
            full = tf.constant([int(_BUCKETS * fullest) for fullest in _FULLEST])
            self._limits = tf.Variable(_most_removed(full), trainable=False)

    def find(self, hashes: tf.Tensor) -> tf.Tensor:
        """int32 row numbers of an int64 vector of hashes; -1 where there is none."""
        return tf.ensure_shape(_find_all(hashes, self._are_many, self._handles), [None])

    def insert(self, hashes: tf.Tensor, rows: tf.Tensor) -> None:
        """Adds hashes that are not there, with their row numbers."""
        are_many = _insert_all(hashes, rows, self._are_many, self._handles)
        self._are_many.assign(are_many, read_value=False)

    def remove(self, hashes: tf.Tensor) -> None:
        """Removes hashes that are there."""
        counts = _remove_all(hashes, self._are_many, self._handles)
        removed, limits = self._removed.read_value() + counts, self._limits.read_value()
        removed, limits = tf.cond(
            tf.reduce_any(removed > limits),
            lambda: tuple(_rewrite_all(removed, limits, self._handles)),
            lambda: (removed, limits),
        )
        self._removed.assign(removed, read_value=False)
        self._limits.assign(limits, read_value=False)

    def clear(self) -> None:
        """Removes all."""
        _clear_all(self._handles)
        self._are_many.assign(False, read_value=False)
        self._removed.assign(tf.zeros([1 + PARTS], _INT), read_value=False)


def _find(hashes: tf.Tensor, are_many: tf.Tensor, tables: tf.Tensor) -> tf.Tensor:
    def find(table: tf.Tensor, hashes: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.LookupTableFindV2(
            table_handle=table, keys=hashes, default_value=tf.constant(-1, _INT)
        )

    def among_many() -> tf.Tensor:
        own, places = _split(hashes, tf.range(tf.size(hashes)))
        found = [find(*of_part) for of_part in zip(_parts(tables), own)]
        return tf.dynamic_stitch(places, found)

    return tf.cond(are_many, among_many, lambda: find(tables[0], hashes))


def _insert(
    hashes: tf.Tensor, rows: tf.Tensor, are_many: tf.Tensor, tables: tf.Tensor
) -> tf.Tensor:
    """Returns whether there are many keys now."""

    def among_many(hashes: tf.Tensor = hashes, rows: tf.Tensor = rows) -> tf.Tensor:
        for of_part in zip(_parts(tables), *_split(hashes, rows)):
            _put(*of_part)
        return tf.constant(True)

    def among_few() -> tf.Tensor:
        one = tables[0]
        _put(one, hashes, rows)
        return tf.cond(_size(one) > _FEW, lambda: move(one), lambda: False)

    def move(one: tf.Tensor) -> tf.Tensor:
        hashes, rows, _ = _contents(one)
        _import_empty(one, tf.constant(_BUCKETS))
        return among_many(hashes, rows)

    return tf.cond(are_many, among_many, among_few)


def _remove(hashes: tf.Tensor, are_many: tf.Tensor, tables: tf.Tensor) -> tf.Tensor:
    """Numbers of keys that each table has lost."""

    def remove(table: tf.Tensor, hashes: tf.Tensor) -> tf.Tensor:
        tf.raw_ops.LookupTableRemoveV2(table_handle=table, keys=hashes)
        return tf.size(hashes)

    def among_many() -> tf.Tensor:
        (own,) = _split(hashes)
        return tf.stack([0, *(remove(*of_part) for of_part in zip(_parts(tables), own))])

    def among_few() -> tf.Tensor:
        return tf.pad([remove(tables[0], hashes)], [[0, PARTS]])

    return tf.cond(are_many, among_many, among_few)


def _rewrite(
    removed: tf.Tensor, limits: tf.Tensor, tables: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Writes tables again without marks of removed keys; returns removed keys and limits.

    Searches for a key that is not there end at a bucket that never had one. New keys take
    buckets with marks as well as those, of which none would be left in the end.
    """
    left = tf.stack([_size(table) for table in tf.unstack(tables)])
    limits = tf.where(removed > limits, _most_removed(left), limits)
    is_over, order = removed > limits, tf.argsort(-removed)
    costs = tf.gather(tf.where(is_over, tf.maximum(left, _LEAST_MOVED), 0), order)
    has_turn = tf.cumsum(costs, exclusive=True) < _MOST_MOVED
    is_due = tf.logical_and(is_over, tf.gather(has_turn, tf.argsort(order)))
    _of_each(tf.gather(tables, places_of(is_due)), _write_again)
    return tf.where(is_due, 0, removed), limits


def _write_again(table: tf.Tensor) -> None:
    keys, rows, buckets = _contents(table)
    _import_empty(table, buckets)
    _put(table, keys, rows)


def _put(table: tf.Tensor, hashes: tf.Tensor, rows: tf.Tensor) -> None:
    tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=hashes, values=rows)


def _contents(table: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Hashes, row numbers, and the number of buckets."""
    keys, rows = (
        tf.reshape(of, [-1])
        for of in tf.raw_ops.LookupTableExportV2(table_handle=table, Tkeys=_LONG, Tvalues=_INT)
    )
    empty, deleted = tf.unstack(_no_keys())
    has_key = places_of(tf.logical_and(keys != empty, keys != deleted))
    return tf.gather(keys, has_key), tf.gather(rows, has_key), tf.size(keys)


def _parts(tables: tf.Tensor) -> list[tf.Tensor]:
    return tf.unstack(tables)[1:]


def _size(table: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.raw_ops.LookupTableSizeV2(table_handle=table), _INT)


def _clear(tables: tf.Tensor) -> tf.Tensor:
    return _of_each(tables, lambda table: _import_empty(table, tf.constant(_BUCKETS)))


def _of_each(tables: tf.Tensor, act: Callable[[tf.Tensor], None]) -> tf.Tensor:
    def one(i: tf.Tensor) -> tf.Tensor:
        act(tf.gather(tables, i))
        return i + 1

    return tf.while_loop(lambda i: i < tf.size(tables), one, [0], parallel_iterations=1)[0]


def _import_empty(table: tf.Tensor, buckets: tf.Tensor) -> None:
    """Has a table have so many buckets without keys."""
    # A table takes the memory of what it imports: with a size that is no constant,
    # TensorFlow makes no tensor that it would import again.
    buckets += tf.minimum(_size(table), 0)
    # It wants matrices, and says vectors in its signature.
    keys, values = (
        tf.raw_ops.PlaceholderWithDefault(input=of, shape=tf.TensorShape(None))
        for of in (tf.fill([buckets, 1], _no_keys()[0]), tf.zeros([buckets, 1], _INT))
    )
    tf.raw_ops.LookupTableImportV2(table_handle=table, keys=keys, values=values)


def _split(hashes: tf.Tensor, *others: tf.Tensor) -> list[list[tf.Tensor]]:
    parts = part_of(tf.bitcast(hashes, tf.uint64), PARTS)
    return [tf.dynamic_partition(values, parts, PARTS) for values in (hashes, *others)]


_hashes, _rows = tf.TensorSpec([None], _LONG), tf.TensorSpec([None], _INT)
_counts, _are_many = tf.TensorSpec([1 + PARTS], _INT), tf.TensorSpec([], tf.bool)
_handles = tf.TensorSpec([1 + PARTS], tf.resource)
_find_all = traced_once(_find, _hashes, _are_many, _handles)
_insert_all = traced_once(_insert, _hashes, _rows, _are_many, _handles)
_remove_all = traced_once(_remove, _hashes, _are_many, _handles)
_clear_all = traced_once(_clear, _handles)
# By itself: TensorFlow makes it ready when it is first needed, which few tables come to.
_rewrite_all = traced_once(_rewrite, _counts, _counts, _handles)


def _no_keys() -> tf.Tensor:
    """Hashes in buckets that never had a key, and in those that had."""
    return hashes_of(tf.constant([FREE, DELETED], _LONG))


def hashes_of(keys: tf.Tensor) -> tf.Tensor:
    """int64 hashes of keys, no two of which are equal."""
    return tf.bitcast(mixed(keys), _LONG)


def _most_removed(keys: tf.Tensor) -> tf.Tensor:
    """Half of the buckets without a key, at least, in parts with so many keys."""
    buckets = tf.constant([_BUCKETS << i for i in range(31 - _BUCKETS.bit_length())])
    full = tf.cast(buckets, tf.float64) * tf.constant(_FULLEST, tf.float64)[:, tf.newaxis]
    doubled = tf.cast(tf.cast(keys, tf.float64)[:, tf.newaxis] > full, _INT)
    return (tf.gather(buckets, tf.reduce_sum(doubled, 1)) - keys) // 2
