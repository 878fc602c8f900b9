"""All that a server, or a process that trains alone, has of a dynamic table.

lookup     nothing is made: a key without a row gets its initial row, or the default
apply      1. find the rows; those that were not used for too long are free
           2. keys without a row: count them; make rows of those that are admitted
           3. the optimizer, on these rows; counts; rows expire
"""

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.tables import admission, snapshot
from keras_psplus.tables import keys as initial_rows
from keras_psplus.tables.admission import Clock, Expiry
from keras_psplus.tables.chunks import ChunkedRows, places_of, traced_once
from keras_psplus.tables.index import BACKUPS, FREQUENCY, PUBLISHING, KeyRows, hashes_of
from keras_psplus.tables.rounding import FLOAT32, at_random
from keras_psplus.tables.row_optimizer import OptimizerTurns, RowOptimizer
from keras_psplus.tables.snapshot import LAST, in_chunks, living

_INT, _LONG = tf.int32, tf.int64
_CHUNK = 1 << 16
# Rows that one call looks through for changes.
_SCANNED = 1 << 20


class RowStore:
    """Rows of keys, with the optimizer that updates them.

    Args:
        spec: Dict with the table's `name`, `dim`, `initializer`, `default`, `admit` and `expire`;
            perhaps serialized, its `constraint` and `regularizer`, and the types in which it is
            stored, `rows_dtype` and `slots_dtype`.
    """

    def __init__(self, spec: dict[str, Any], server: int = 0, servers: int = 1) -> None:
        self._spec, self.dim = spec, spec["dim"]
        self.clock = Clock()
        self._expiry = Expiry(spec["expire"], self.clock, servers, server)
        self.weights = self._make_column("rows_dtype")
        self.key_rows = KeyRows(spec["name"], lambda: self.clock.step() + 1, self.weights)
        self.admission = admission.make(
            spec["admit"], spec["name"], self.clock, self._expiry, server, servers
        )
        self._initial = initial_rows.maker(spec)
        self.optimizer: RowOptimizer | None = None
        self._slot_initializers: list[Any] = []
        self._turns = OptimizerTurns(spec["name"])
        self._apply_all: Any = None

    @property
    def slots(self) -> list[ChunkedRows]:
        return self.optimizer.slots if self.optimizer else []

    @property
    def columns(self) -> list[ChunkedRows]:
        """The rows, and those of each slot."""
        return [self.weights, *self.slots]

    def set_optimizer(self, config: dict[str, Any]) -> None:
        """Makes an optimizer and its slots, in the place of the last one."""
        initializers: list[Any] = []

        def make_slot(initializer: Any, shape: Any) -> ChunkedRows:
            initializers.append(initializer)
            return self._make_column("slots_dtype")

        with tf.init_scope():
            self.key_rows.log.begin()
            own = {of: self._spec.get(of) for of in ("constraint", "regularizer")}
            self.optimizer = RowOptimizer({**config, **own}, self.weights, make_slot)
            self._slot_initializers = initializers
            self.key_rows.set_others(self.columns)
            keys, gradient = tf.TensorSpec([None], _LONG), tf.TensorSpec([None, self.dim])
            numbers = tf.TensorSpec([]), tf.TensorSpec([None]), tf.TensorSpec([], _LONG)
            # One operation: who waits for it has waited for all that it writes.
            apply = functools.partial(self._apply, self._turns.next())
            self._apply_all = traced_once(apply, keys, gradient, *numbers)
            # Of rows that there are already.
            rows = int(self.key_rows.next.numpy())
            for slot in self.slots:
                slot.allocate(tf.constant(rows))
            for first in range(0, rows, _CHUNK):
                self._start_slots(tf.range(first, min(first + _CHUNK, rows)))

    def _make_column(self, what: str) -> ChunkedRows:
        return ChunkedRows(self.dim, tf.as_dtype(self._spec.get(what, FLOAT32)))

    def lookup(self, keys: tf.Tensor, trains: bool) -> tf.Tensor:
        """Rows of keys, and what there is in place of those that are missing.

        Args:
            keys: int64 vector.
        """
        rows = self._expiry.living(self.key_rows, self.key_rows.index.find(hashes_of(keys)))
        values = self.weights.sparse_read(tf.maximum(rows, 0))
        is_initial = self._spec["default"] != initial_rows.ZEROS or (
            trains and self._spec["admit"] is None
        )

        def filled() -> tf.Tensor:
            missing = tf.cast(tf.where(rows < 0), _INT)
            if is_initial:
                instead = self._initial(tf.gather(keys, missing[:, 0]))
            else:
                instead = tf.zeros([tf.shape(missing)[0], self.dim])
            return tf.tensor_scatter_nd_update(values, missing, instead)

        has_all = tf.reduce_all(rows >= 0)
        return tf.ensure_shape(tf.cond(has_all, lambda: values, filled), [None, self.dim])

    def apply(
        self,
        keys: tf.Tensor,
        gradient: tf.Tensor,
        learning_rate: tf.Tensor,
        scalars: tf.Tensor,
        iterations: tf.Tensor,
    ) -> tf.Operation:
        """Updates rows, and makes those of new keys.

        Args:
            keys: int64 vector of distinct keys.
            gradient: float32 tensor of shape `(len(keys), dim)`.
            learning_rate: float32 scalar.
            iterations: int64 scalar: updates before this one.

        Returns:
            The operation after which all is done.
        """
        rate = tf.convert_to_tensor(learning_rate, tf.float32)
        return tf.group(self._apply_all(keys, gradient, rate, scalars, iterations))

    def _apply(
        self,
        turn: int,
        keys: tf.Tensor,
        gradient: tf.Tensor,
        learning_rate: tf.Tensor,
        scalars: tf.Tensor,
        iterations: tf.Tensor,
    ) -> tf.Tensor:
        assert self.optimizer is not None
        keys = self._turns.checked(turn, keys)
        key_rows, hashes = self.key_rows, hashes_of(keys)
        rows = self._expiry.find(key_rows, hashes)
        was_there = rows >= 0
        rows = tf.cond(
            tf.reduce_all(was_there), lambda: rows, lambda: self._make_missing(keys, hashes, rows)
        )
        if self._spec["admit"] is not None:
            has_row = rows >= 0
            of_rows, with_row = (keys, rows, gradient, was_there), places_of(has_row)
            keys, rows, gradient, was_there = tf.cond(
                tf.reduce_all(has_row),
                lambda: of_rows,
                lambda: tuple(tf.gather(of, with_row) for of in of_rows),
            )
        rows = tf.ensure_shape(rows, [None])
        key_rows.keep(tf.where(was_there, rows, -1))
        stored, update = [column.stored for column in self.columns], self.clock.steps.read_value()

        def rounded(column: int, values: tf.Tensor) -> tf.Tensor:
            in_16_bits = stored[column] == tf.bfloat16
            return at_random(values, keys, update, column) if in_16_bits else values

        done = self.optimizer.apply(rows, gradient, learning_rate, scalars, iterations, rounded)
        with tf.control_dependencies([done]):
            frequency = key_rows.meta(rows)[:, FREQUENCY] + tf.cast(was_there, _INT)
            now, seconds = self.clock.step() + 1, tf.cast(tf.timestamp(), _INT)
            key_rows.note(rows, frequency, now, seconds)
            self._expiry.after_update(key_rows, rows, self.weights)
            self.clock.tick()
            self._expiry.sweep(key_rows, "rows")
            return self.clock.steps.read_value()

    def _make_missing(self, keys: tf.Tensor, hashes: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
        missing = tf.cast(tf.where(rows < 0)[:, 0], _INT)
        keys, hashes = tf.gather(keys, missing), tf.gather(hashes, missing)
        admitted, counts = self.admission.admit(keys, hashes)
        admitted = places_of(admitted)
        keys, counts, missing = (tf.gather(of, admitted) for of in (keys, counts, missing))
        meta = tf.pad(counts[:, tf.newaxis], [[0, 0], [0, 2]])
        made = self.key_rows.add(keys, meta)
        self.weights.write(made, self._initial(keys))
        self._start_slots(made)
        return tf.tensor_scatter_nd_update(rows, missing[:, tf.newaxis], made)

    def _start_slots(self, rows: tf.Tensor) -> None:
        for slot, initializer in zip(self.slots, self._slot_initializers):
            slot.write(rows, initializer([tf.size(rows), self.dim], dtype="float32"))

    # Changes.

    def removed(self, since: tf.Tensor) -> tf.Tensor:
        """Keys that were removed after a generation and an update of the log.

        Returns:
            int64 vector: generation, updates and time now, the end of the rows, whether the log
            has all since then, and keys.
        """
        log = self.key_rows.log
        state = [
            log.generation.read_value(),
            self.clock.steps.read_value(),
            tf.cast(self.clock.seconds.read_value(), _LONG),
            tf.cast(self.key_rows.next.read_value(), _LONG),
        ]
        is_known, keys = log.since(PUBLISHING, since[0], since[1])
        return tf.concat([tf.stack([*state, tf.cast(is_known, _LONG)]), keys], 0)

    def changed(self, since: tf.Tensor, first: tf.Tensor, most: int) -> tf.Tensor:
        """Rows that an update after a step has changed, or that have expired since.

        Args:
            since: int64 vector of a step and a time in seconds.
            first: int32 number of the row with which to begin.
            most: How many rows to return.

        Returns:
            Lines of `changes.encode`; the place of the last is the row with which to go on.
        """
        end = tf.minimum(first + _SCANNED, self.key_rows.next.read_value())
        rows = tf.range(first, end)
        step, seconds = tf.unstack(tf.cast(since, _INT))
        lives, died = self._expiry.changed(self.key_rows, rows, step, seconds)
        found = tf.gather(rows, places_of(tf.logical_or(lives, died)))
        end = tf.cond(tf.size(found) > most, lambda: found[most], lambda: end)
        found = found[:most]
        lives = tf.gather(lives, found - first)
        lines = snapshot.encode(
            self.key_rows.keys(found),
            tf.where(lives, found, -1 - found),
            self.weights.sparse_read(found),
        )
        last = snapshot.encode(tf.zeros([1], _LONG), end[tf.newaxis], tf.zeros([1, self.dim]))
        return tf.concat([lines, last], 0)

    def freeze(self, since: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Has rows, and keys that are counted, kept as they are, while updates go on.

        Args:
            since: int64 vector: generations of both logs and updates at an earlier moment, whose
                changes since are wanted.

        Returns:
            int64 vectors: the same of now, time in seconds, the ends of rows and candidates, and
            whether all is to be read, as not all changes are known; keys of rows that were removed;
            candidates that were. And the blocks of a Bloom filter.
        """
        tables = [self.key_rows, *filter(None, [self.admission.candidates])]
        logs = [table.log for table in tables]
        looks = [log.since(BACKUPS, one, since[2]) for log, one in zip(logs, tf.unstack(since))]
        is_known, steps = (
            tf.reduce_all([known for known, _ in looks]),
            self.clock.steps.read_value(),
        )
        after = tf.where(is_known, since[2], -1)
        none = [tf.zeros([], _LONG)] * (2 - len(tables))
        state = [
            *[log.generation.read_value() for log in logs],
            *none,
            steps,
            tf.cast(self.clock.seconds.read_value(), _LONG),
            *[tf.cast(table.frozen.freeze(after, steps), _LONG) for table in tables],
            *none,
            tf.cast(tf.logical_not(is_known), _LONG),
        ]
        gone = [keys for _, keys in looks] + [tf.zeros([0], _LONG)] * len(none)
        filter_ = self.admission.filter
        blocks = tf.zeros([0], tf.uint8) if filter_ is None else filter_.read_value()
        return tf.stack(state), *gone, blocks

    # Contents.

    def entries(self, first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """As `KeyRows.entries`, of the rows that count; others have the frequency -1."""
        return self._entries_of(self.key_rows, first, count)

    def _entries_of(self, key_rows: KeyRows, first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        entries = key_rows.entries(first, count)
        rows = self._expiry.living(key_rows, first + tf.range(tf.shape(entries)[0]))
        free = tf.constant([[0, -1, 0, 0]], _LONG)
        return tf.where(rows[:, tf.newaxis] >= 0, entries, free)

    def insert(self, entries: tf.Tensor) -> tf.Tensor:
        """Makes rows for keys that have none; returns their number."""
        self.key_rows.log.begin()
        # Of several servers, each may have had updates of its own.
        steps = tf.reduce_max(tf.concat([[self.clock.steps.read_value()], entries[:, LAST]], 0))
        self.clock.steps.assign(steps)
        rows = self.key_rows.add_entries(entries)
        self.weights.write(rows, self._initial(entries[:, 0]))
        self._start_slots(rows)
        return tf.size(rows)

    def admit(self, keys: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Gives rows to distinct keys, where they have none, as of this moment.

        Args:
            counts: int64 frequencies of the keys; 0 for 1, and for one that stays as it is.

        Returns:
            The number of keys.
        """
        now, seconds = self.clock.step(), tf.cast(tf.timestamp(), _INT)
        missing = places_of(self._expiry.find(self.key_rows, hashes_of(keys)) < 0)
        new, times = tf.gather(keys, missing), tf.cast([now, seconds], _LONG)
        frequency = tf.maximum(tf.gather(counts, missing), 1)
        times = tf.tile(times[tf.newaxis], [tf.size(new), 1])
        self.insert(tf.concat([tf.stack([new, frequency], 1), times], 1))
        if self.admission.candidates is not None:
            self.admission.candidates.remove_keys(new)
        counted = places_of(counts > 0)
        rows = self.key_rows.index.find(hashes_of(tf.gather(keys, counted)))
        self.key_rows.note(rows, tf.cast(tf.gather(counts, counted), _INT), now, seconds)
        return tf.size(keys)

    def remove(self, keys: tf.Tensor) -> tf.Tensor:
        """Takes their rows, and what admission has counted, from distinct keys."""
        self.key_rows.remove_keys(keys)
        if self.admission.candidates is not None:
            self.admission.candidates.remove_keys(keys)
        return tf.size(keys)

    def write(self, slot: int, keys: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        """Sets rows, or rows of an optimizer's slot, of keys that are there."""
        self.key_rows.log.begin()
        rows = self.key_rows.index.find(hashes_of(keys))
        self.columns[slot].write(rows, values)
        return tf.size(rows)

    def clear(self) -> None:
        """Removes all rows and what admission has counted."""
        self.key_rows.log.begin()
        self.key_rows.clear()
        if self.admission.candidates is not None:
            self.admission.candidates.log.begin()
            self.admission.candidates.clear()
        if self.admission.filter is not None:
            self.admission.filter.assign(tf.zeros_like(self.admission.filter))

    def counters(self) -> tuple[np.ndarray, np.ndarray]:
        """Counts of admission: entries of candidates, and blocks of a Bloom filter."""
        candidates, filter_ = self.admission.candidates, self.admission.filter
        entries = np.zeros([0, 4], np.int64)
        if candidates is not None:
            entries = in_chunks(lambda i, n: self.candidates(i, n).numpy(), _CHUNK)
            entries = entries[living(entries)]
        blocks = np.zeros([0, 0], np.uint8)
        if filter_ is not None:
            blocks = filter_.numpy().reshape(self.admission.blocks, -1)
        return entries, blocks

    def candidates(self, first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """As `entries`, of keys that are counted and have no row yet."""
        candidates = self.admission.candidates
        assert candidates is not None
        return self._entries_of(candidates, first, count)

    def insert_candidates(self, entries: tf.Tensor) -> tf.Tensor:
        """Adds keys that are counted; returns their number."""
        assert self.admission.candidates is not None
        return tf.size(self.admission.candidates.add_entries(entries))

    def set_counters(self, candidates: np.ndarray, blocks: np.ndarray) -> None:
        """Sets what admission has counted, of a table that has been cleared."""
        if self.admission.candidates is not None:
            self.insert_candidates(tf.constant(candidates, _LONG))
        own = self.admission.filter
        if own is not None and blocks.size == own.shape[0]:
            own.assign(blocks.reshape(-1))
