"""Row numbers of keys, in TensorFlow's dense hash tables.

A table that is full doubles, and moves all of its keys, some 15 million a second. So one table has
the first 262,144 keys. More are in many, by the highest bits of a key's hash, each of which is full
at another number of keys: they never grow together.

    table       0        1      2      3     ...     64
    has       few keys   or many, in parts
    full at    0.90     0.90   0.89   0.88   ...    0.45  of its buckets

Two hashes say that a bucket is empty, or its key removed. The rows of keys with these are kept in a
variable.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from keras_psplus.tables import chunks
from keras_psplus.tables.chunks import MOST_ROWS, ChunkedRows, FrozenRows, places_of, traced_once
from keras_psplus.tables.keys import mix_number, mixed, part_of

PARTS = 64
_FEW = 1 << 18
_BUCKETS = 1 << 10
_FULLEST = [0.9, *(0.9 * 2 ** (-i / PARTS) for i in range(PARTS))]
# Keys that one update moves so that tables lose the marks of removed ones; each counts as some.
_MOST_MOVED, _LEAST_MOVED = 1 << 16, 1 << 11
_INT, _LONG = tf.int32, tf.int64
# Hashes in buckets that never had a key, and in those that had: of the two smallest keys.
_EMPTY, _DELETED = ((mix_number(2**63 + i) + 2**63) % 2**64 - 2**63 for i in range(2))


class KeyIndex:
    """Maps hashes of keys to row numbers; its methods may be called in graphs."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("/CPU:0"):
            self._tables = [
                tf.raw_ops.AnonymousMutableDenseHashTable(
                    empty_key=tf.constant(_EMPTY, _LONG),
                    deleted_key=tf.constant(_DELETED, _LONG),
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
            # Row numbers of the keys with the two hashes, or -1.
            self._aside = tf.Variable([-1, -1], dtype=_INT, trainable=False)
            # Removed keys of each table, and how many it may have before somebody looks.
            self._removed = tf.Variable(tf.zeros([1 + PARTS], _INT), trainable=False)
            full = tf.constant([int(_BUCKETS * fullest) for fullest in _FULLEST])
            self._limits = tf.Variable(_most_removed(full), trainable=False)

    def find(self, hashes: tf.Tensor) -> tf.Tensor:
        """int32 row numbers of an int64 vector of hashes; -1 where there is none."""
        which = _which_aside(hashes)

        def with_aside() -> tf.Tensor:
            # Others are found in the place of the two.
            found = find(tf.where(which >= 0, hashes ^ 1, hashes))
            aside = tf.gather(self._aside.read_value(), tf.maximum(which, 0))
            return tf.where(which >= 0, aside, found)

        def find(hashes: tf.Tensor) -> tf.Tensor:
            return _find_all(hashes, self._are_many, self._handles)

        found = tf.cond(tf.reduce_any(which >= 0), with_aside, lambda: find(hashes))
        return tf.ensure_shape(found, [None])

    def insert(self, hashes: tf.Tensor, rows: tf.Tensor) -> None:
        """Adds hashes that are not there, with their row numbers."""
        hashes, rows = self._set_aside(hashes, rows)
        are_many = _insert_all(hashes, rows, self._are_many, self._handles)
        self._are_many.assign(are_many, read_value=False)

    def remove(self, hashes: tf.Tensor) -> None:
        """Removes hashes that are there."""
        hashes, _ = self._set_aside(hashes, tf.fill(tf.shape(hashes), -1))
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
        _clear_all(self._handles)
        self._aside.assign([-1, -1], read_value=False)
        self._are_many.assign(False, read_value=False)
        self._removed.assign(tf.zeros([1 + PARTS], _INT), read_value=False)

    def _set_aside(self, hashes: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Sets rows of the two hashes; returns the others."""
        which = _which_aside(hashes)

        def others() -> tuple[tf.Tensor, tf.Tensor]:
            two, rest = places_of(which >= 0), places_of(which < 0)
            at = tf.gather(which, two)[:, tf.newaxis]
            before = self._aside.read_value()
            after = tf.tensor_scatter_nd_update(before, at, tf.gather(rows, two))
            self._aside.assign(after, read_value=False)
            return tf.gather(hashes, rest), tf.gather(rows, rest)

        return tf.cond(tf.reduce_any(which >= 0), others, lambda: (hashes, rows))


def _which_aside(hashes: tf.Tensor) -> tf.Tensor:
    """Index of each hash among the two that no bucket may have, or -1."""
    return tf.where(hashes == _EMPTY, 0, tf.where(hashes == _DELETED, 1, -1))


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
    has_key = places_of(tf.logical_and(keys != _EMPTY, keys != _DELETED))
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
        for of in (tf.fill([buckets, 1], tf.constant(_EMPTY, _LONG)), tf.zeros([buckets, 1], _INT))
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


def hashes_of(keys: tf.Tensor) -> tf.Tensor:
    """int64 hashes of keys, no two of which are equal."""
    return tf.bitcast(mixed(keys), _LONG)


def _most_removed(keys: tf.Tensor) -> tf.Tensor:
    """Half of the buckets without a key, at least, in parts with so many keys."""
    buckets = tf.constant([_BUCKETS << i for i in range(31 - _BUCKETS.bit_length())])
    full = tf.cast(buckets, tf.float64) * tf.constant(_FULLEST, tf.float64)[:, tf.newaxis]
    doubled = tf.cast(tf.cast(keys, tf.float64)[:, tf.newaxis] > full, _INT)
    return (tf.gather(buckets, tf.reduce_sum(doubled, 1)) - keys) // 2


# Keys that have lost their rows, for those who follow a table.


# So that a message has them all.
_MOST = 1 << 18
# Those who read it.
PUBLISHING, BACKUPS = range(2)


class RemovalLog:
    """The last keys that were removed, each with the update in which it was.

    A reader that has followed the log to an update gets what came after it; what all readers have
    followed is forgotten. Once it is full, or the rows were set otherwise than by updates, it
    begins again, with another number of its generation: a reader that has followed the one before
    has to read the whole table.

    Attributes:
        generation: int64 variable.
    """

    def __init__(self) -> None:
        self._most = min(_MOST, chunks.MOST_ROWS)
        self._removed = ChunkedRows(2, _LONG, self._most)
        with tf.init_scope():
            self._count = tf.Variable(0, dtype=_INT, trainable=False)
            self._floor = tf.Variable(0, dtype=_LONG, trainable=False)
            # Up to which update each reader has it; the largest number of one that does not read.
            self._read = tf.Variable([_LONG.max] * 2, dtype=_LONG, trainable=False)
            # Another one in a process that is started again.
            first = int.from_bytes(os.urandom(6), "big")
            self.generation = tf.Variable(first, dtype=_LONG, trainable=False)

    def note(self, keys: tf.Tensor, update: tf.Tensor) -> tf.Tensor:
        """Adds keys that an update removes; returns a tensor to wait for."""
        count, size = self._count.read_value(), tf.size(keys)

        def add() -> tf.Tensor:
            self._removed.allocate(count + size)
            updates = tf.fill([size], tf.cast(update, _LONG))
            rows = tf.range(count, count + size)
            with tf.control_dependencies([self._removed.write(rows, tf.stack([keys, updates], 1))]):
                return self._count.assign_add(size, read_value=True)

        return tf.cond(count + size <= self._most, add, self.begin)

    def begin(self) -> tf.Tensor:
        """Begins another generation; returns a tensor to wait for."""
        with tf.control_dependencies([self.generation.assign_add(1, read_value=True)]):
            self._floor.assign(0, read_value=False)
            self._read.assign([_LONG.max] * 2, read_value=False)
            return self._count.assign(0, read_value=True)

    def since(
        self, reader: int, generation: tf.Tensor, update: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Keys that were removed after an update, up to which a reader has all.

        Args:
            reader: `PUBLISHING` or `BACKUPS`.
            generation: That of the log when the reader read it.
            update: The last one at that time.

        Returns:
            Whether the log has all since then, and the int64 keys.
        """
        removed = self._removed.sparse_read(tf.range(self._count.read_value()))
        floor, same = self._floor.read_value(), tf.equal(generation, self.generation.read_value())
        is_known = tf.logical_and(same, update >= floor)
        read = tf.tensor_scatter_nd_update(
            self._read.read_value(), [[reader]], [tf.where(is_known, update, floor)]
        )
        floor = tf.reduce_min(read)
        kept = tf.gather(removed, places_of(removed[:, 1] > floor))
        with tf.control_dependencies([self._removed.write(tf.range(tf.shape(kept)[0]), kept)]):
            self._count.assign(tf.shape(kept)[0], read_value=False)
            self._floor.assign(floor, read_value=False)
            self._read.assign(read, read_value=False)
        after = places_of(tf.logical_and(is_known, kept[:, 1] > update))
        return is_known, tf.gather(kept[:, 0], after)


# Keys and the numbers of their rows, which are used again.
#
# column    key      meta: frequency, last use, its time in seconds
# row 0     17             5         812       1795702463
# row 1                    -1           0              0    (on the stack of free rows)


FREQUENCY, LAST, SEEN = range(3)


class KeyRows:
    """Rows of keys, with each row's frequency and last use.

    Args:
        update: Function that returns the number of the update that goes on.
        *others: `ChunkedRows` that have as many rows.

    Attributes:
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
        self.others = list(others)
        rows = tf.TensorSpec([None], _INT)
        self._remove_rows = traced_once(self._remove_unless_empty, rows)
        self._keep_rows = traced_once(self.frozen.keep, rows)

    def count(self) -> tf.Tensor:
        """int32 scalar, how many rows have a key."""
        return self.next.read_value() - self._free_count.read_value()

    def keys(self, rows: tf.Tensor) -> tf.Tensor:
        """int64 keys of rows that have one."""
        return self._keys.sparse_read(rows)[:, 0]

    def have_key(self, rows: tf.Tensor) -> tf.Tensor:
        """Whether rows have a key."""
        return self.meta(rows)[:, FREQUENCY] >= 0

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
        self._meta.write(rows, tf.tile([[-1, 0, 0]], [count, 1]))
        self._free.allocate(free + count)
        self._free.write(tf.range(free, free + count), rows[:, tf.newaxis])
        self._free_count.assign_add(count, read_value=False)
        return 0

    def clear(self) -> None:
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
