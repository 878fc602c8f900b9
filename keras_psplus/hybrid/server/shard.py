"""One parameter server's rows of a table, plain or dynamic, and methods of these.

Row `r` of a table is row `r // servers` on server `r % servers`, so that a range of frequent ids
is shared out between them. Keys of a dynamic table are shared out by their hashes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from keras_psplus.compression import Compressor
from keras_psplus.files.tables import rows_of
from keras_psplus.hybrid import calls
from keras_psplus.hybrid.rows import (
    MESSAGE_BYTES,
    MissingUpdates,
    RowCodec,
    RowUndoLog,
    make_variable,
)
from keras_psplus.tables import files, snapshot
from keras_psplus.tables.chunks import ChunkedRows
from keras_psplus.tables.row_optimizer import RowOptimizer
from keras_psplus.tables.store import RowStore

_INT, _LONG, _FLOAT = tf.int32, tf.int64, tf.float32
# A first row and a count, or one past the last; entries of keys.
_RANGE = tf.TensorSpec([], _INT), tf.TensorSpec([], _INT)
_ENTRIES = tf.TensorSpec([None, 4], _LONG)
# More parts than one step's rows could ever need.
PARTS = 1 << 20
# A function with a signature, that is served.
Method: TypeAlias = tf.types.experimental.PolymorphicFunction


class TableShard:
    """Rows of one table, with the optimizer that updates them.

    `spec` has the table's `key` (a number), `name`, `rows`, `dim` and `initializer` (serialized, or
    None for zeros). With `sync`, the pushes of so many replicas are summed and applied once a step;
    `keeps_undo_log` if the rows of the step before can be read.
    """

    # Type of what workers name rows by.
    _ids = _INT

    def __init__(
        self,
        spec: dict[str, Any],
        server: int,
        servers: int,
        pull_compressor: Compressor | None,
        push_compressor: Compressor | None,
        replicas: int,
        sync: bool,
        keeps_undo_log: bool = False,
    ) -> None:
        self.spec = spec
        self.name, self.dim = spec["name"], spec["dim"]
        self._pull = RowCodec.of_pulls(pull_compressor, spec)
        self._push = RowCodec(push_compressor, self.dim)
        self._replicas, self._sync = replicas, sync
        self.optimizer: RowOptimizer | None = None
        self._optimizer_number = self._first_slot = 0
        self._methods: dict[str, Method] = {}
        # Number of steps that were applied.
        self.version = tf.Variable(0, dtype=_LONG, trainable=False)
        self._undo_log: RowUndoLog | None = None
        # Of methods that are served; workers ask for further ones.
        self.groups = set(calls.GROUPS)
        self._make_rows(server, servers, keeps_undo_log)
        self._seen = tf.Variable(tf.fill([replicas], tf.constant(-1, _LONG)), trainable=False)
        self.missing_updates = MissingUpdates(replicas, PARTS)
        self._arrived = tf.Variable(0, dtype=_INT, trainable=False)
        self._lock = tf.CriticalSection(name=f"table_{spec['key']}")
        self._inbox = tf.queue.FIFOQueue(1 << 20, [_LONG, self._ids, _FLOAT])
        self._sum_ids = tf.Variable(tf.zeros([0], self._ids), shape=[None], trainable=False)
        self._sum_rows = tf.Variable(
            tf.zeros([0, self.dim]), shape=[None, self.dim], trainable=False
        )

    def _make_rows(self, server: int, servers: int, keeps_undo_log: bool) -> None:
        self.rows = rows_of(self.spec["rows"], server, servers)
        self.weights = make_variable(self.spec, server, servers)
        if keeps_undo_log:
            self._undo_log = RowUndoLog(self.weights, self.version)

    @property
    def variables(self) -> dict[int, tf.Variable]:
        """The rows and the optimizer's slots of them, by the numbers that workers give them."""
        return {0: self.weights, **dict(enumerate(self.slots, self._first_slot))}

    @property
    def _updater(self) -> RowOptimizer:
        assert self.optimizer is not None
        return self.optimizer

    @property
    def slots(self) -> list[tf.Variable]:
        return self.optimizer.slots if self.optimizer else []

    def counts(self) -> tf.Tensor:
        """Number of updates, and the last one of each replica, for `take_up`."""
        return tf.concat([[self.version.read_value()], self._seen.read_value()], 0)

    def take_up(self, counts: np.ndarray) -> None:
        """Goes on where another process was, while workers go on where they are."""
        self.version.assign(counts[0])
        self._seen.assign(counts[1:])
        self.missing_updates.begin()

    def set_optimizer(self, config: dict[str, Any], number: int, first_slot: int) -> None:
        """Makes an optimizer and its slots, in the place of the last one.

        `number` is its number among those that this table has had; slots are numbered on.
        """
        self.optimizer = RowOptimizer(config, self.weights)
        self._optimizer_number, self._first_slot = number, first_slot

    def methods(self) -> dict[str, Method]:
        known, makers = self._methods, self._makers()
        self._methods = {
            what: known[what] if what in known else make() for what, make in makers.items()
        }
        return self._methods

    def _makers(self) -> dict[str, Callable[[], Method]]:
        makers = {"lookup": self._lookup}
        if self._undo_log is not None:
            of_table = self._lock, self._pull.encode
            makers["lookup_at"] = functools.partial(self._undo_log.lookup, *of_table)
        for i, variable in self.variables.items():
            makers[f"read{i}"] = functools.partial(self._read, variable)
            makers[f"write{i}"] = functools.partial(self._write, variable)
        if self.optimizer is not None:
            number = self._optimizer_number  # Traces of an earlier optimizer do not fit this one.
            makers[f"push{number}"] = self._push_function
            if self._sync:
                makers[f"norm{number}"], makers[f"commit{number}"] = self._norm, self._commit
        return makers

    def pushes(self) -> list[int]:
        return [1 + int(key) // PARTS for key in self._seen.numpy()]

    def _lookup(self) -> Method:
        return traced(tf.TensorSpec([None], _INT))(
            lambda ids: self._pull.encode(self.weights.sparse_read(ids), self.version.read_value())
        )

    def _read(self, variable: tf.Variable) -> Method:
        return traced(*_RANGE)(
            lambda first, count: variable.sparse_read(tf.range(first, first + count))
        )

    def _write(self, variable: tf.Variable) -> Method:
        @traced(tf.TensorSpec([], _INT), tf.TensorSpec([None, self.dim], _FLOAT))
        def write(first: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
            count = tf.shape(rows)[0]
            ids = tf.range(first, first + count)
            tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=ids, updates=rows)
            return count

        return write

    def _push_function(self) -> Method:
        # Replica, its number of pushes before this one, part of it, whether that is the last,
        # whether to wait for `commit`, and the optimizer's iterations.
        header = tf.TensorSpec([6], _LONG)
        numbers = tf.TensorSpec([1 + self._updater.scalars], _FLOAT)
        ids = tf.TensorSpec([None], self._ids)
        words = tf.TensorSpec([None, self._push.width], _FLOAT)

        @traced(header, numbers, ids, words)
        def push(
            header: tf.Tensor, numbers: tf.Tensor, ids: tf.Tensor, words: tf.Tensor
        ) -> tf.Tensor:
            replica, step, part, last, waits, iterations = tf.unstack(header)
            gradient = self._push.decode(words, step)
            key = step * PARTS + part

            def take(last_seen: tf.Tensor) -> tf.Tensor:
                noted = [] if self._sync else [self.missing_updates.note(replica, key, last_seen)]
                with tf.control_dependencies(noted):
                    seen = tf.raw_ops.ResourceScatterUpdate(
                        resource=self._seen.handle, indices=replica, updates=key
                    )
                with tf.control_dependencies([seen]):
                    if not self._sync:
                        return self._take_at_once(ids, gradient, numbers, iterations)
                    return self._take_in(
                        replica * PARTS + part, ids, gradient, numbers, iterations, last, waits
                    )

            def locked() -> tf.Tensor:
                # One that comes again, as its answer was lost or late, has been taken, or is taken
                # while this one waits.
                last_seen = self._seen.read_value()[replica]
                return tf.cond(key > last_seen, lambda: take(last_seen), self.version.read_value)

            return self._lock.execute(locked)

        return push

    def _take_at_once(
        self, ids: tf.Tensor, gradient: tf.Tensor, numbers: tf.Tensor, iterations: tf.Tensor
    ) -> tf.Tensor:
        gradient = self._updater.regularized(ids, gradient)
        return self._apply(ids, gradient, numbers, iterations)

    def _apply(
        self, ids: tf.Tensor, gradient: tf.Tensor, numbers: tf.Tensor, iterations: tf.Tensor
    ) -> tf.Tensor:
        if self._undo_log is not None:
            self._undo_log.record(ids)
        done = self._updater.apply(ids, gradient, numbers[0], numbers[1:], iterations)
        with tf.control_dependencies([done]):
            return self.version.assign_add(1, read_value=True)

    def _take_in(
        self,
        place: tf.Tensor,
        ids: tf.Tensor,
        gradient: tf.Tensor,
        numbers: tf.Tensor,
        iterations: tf.Tensor,
        last: tf.Tensor,
        waits: tf.Tensor,
    ) -> tf.Tensor:
        with tf.control_dependencies([self._inbox.enqueue((place, ids, gradient))]):
            arrived = self._arrived.assign_add(tf.cast(last, _INT), read_value=True)

        def complete() -> tf.Tensor:
            ids, gradient = self._sum()
            gradient = self._updater.regularized(ids, gradient)

            def keep() -> tf.Tensor:
                self._sum_ids.assign(ids)
                self._sum_rows.assign(gradient)
                return self.version.read_value()

            def apply() -> tf.Tensor:
                return self._apply(ids, gradient, numbers, iterations)

            with tf.control_dependencies([self._arrived.assign(0, read_value=False)]):
                return tf.cond(waits > 0, keep, apply)

        return tf.cond(tf.equal(arrived, self._replicas), complete, self.version.read_value)

    def _sum(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Sums received gradients in the order of replicas, independently of arrival."""
        # A loop costs more than what is summed, and there is seldom more than a part of each.
        places, sizes, ids, rows = tf.cond(
            tf.equal(self._inbox.size(), self._replicas), self._part_of_each, self._all_parts
        )
        order, starts = tf.argsort(places), tf.cumsum(sizes, exclusive=True)
        in_order = tf.ragged.range(
            tf.gather(starts, order), tf.gather(starts + sizes, order)
        ).flat_values
        unique, positions = tf.unique(tf.gather(ids, in_order))
        rows = tf.gather(rows, in_order)
        return unique, tf.math.unsorted_segment_sum(rows, positions, tf.size(unique))

    def _next_part(self) -> tuple[tf.Tensor, ...]:
        place, ids, rows = self._inbox.dequeue()
        ids = tf.ensure_shape(ids, [None])
        rows = tf.ensure_shape(rows, [None, self.dim])
        return tf.ensure_shape(place, []), tf.size(ids), ids, rows

    def _part_of_each(self) -> tuple[tf.Tensor, ...]:
        places, sizes, ids, rows = zip(*[self._next_part() for _ in range(self._replicas)])
        return tf.stack(places), tf.stack(sizes), tf.concat(ids, 0), tf.concat(rows, 0)

    def _all_parts(self) -> tuple[tf.Tensor, ...]:
        count = self._inbox.size()
        shapes: tuple[list[int | None], ...] = [], [], [None], [None, self.dim]
        start = [
            tf.TensorArray(dtype, count, infer_shape=False, element_shape=shape)
            for dtype, shape in zip((_LONG, _INT, self._ids, _FLOAT), shapes)
        ]

        def take(i: tf.Tensor, *arrays: tf.TensorArray) -> tuple[Any, ...]:
            return i + 1, *(a.write(i, part) for a, part in zip(arrays, self._next_part()))

        _, places, sizes, ids, rows = tf.while_loop(
            lambda i, *_: i < count, take, (0, *start), parallel_iterations=1
        )
        return places.stack(), sizes.stack(), ids.concat(), rows.concat()

    def _norm(self) -> Method:
        return traced(tf.TensorSpec([], _INT))(
            lambda unused: tf.reduce_sum(tf.square(self._sum_rows.read_value()))
        )

    def _commit(self) -> Method:
        numbers = tf.TensorSpec([2 + self._updater.scalars], _FLOAT)

        @traced(tf.TensorSpec([2], _LONG), numbers)
        def commit(header: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
            step, iterations = tf.unstack(header)

            def apply() -> tf.Tensor:
                gradient = self._sum_rows.read_value() * numbers[0]
                return self._apply(self._sum_ids.read_value(), gradient, numbers[1:], iterations)

            def locked() -> tf.Tensor:
                # All replicas say it; the first one counts.
                version = self.version.read_value()
                return tf.cond(tf.equal(version, step), apply, lambda: version)

            return self._lock.execute(locked)

        return commit


def traced(*signature: tf.TensorSpec) -> Callable[[Callable[..., tf.Tensor]], Method]:
    """Decorator of a method: a function with this signature."""
    return tf.function(input_signature=signature, autograph=False)


class DynamicShard(TableShard):
    """Keys and rows of one dynamic table; workers name rows by keys."""

    _ids = _LONG

    def _make_rows(self, server: int, servers: int, keeps_undo_log: bool) -> None:
        self.store = RowStore(self.spec, server, servers)
        self.groups = {"training"}
        self._capturing: tuple[files.Freeze, list[files.Read]] | None = None

    @property
    def variables(self) -> dict[int, Any]:
        return {}

    @property
    def slots(self) -> list[Any]:
        return self.store.slots

    def set_optimizer(self, config: dict[str, Any], number: int, first_slot: int) -> None:
        self.store.set_optimizer(config)
        self.optimizer = self.store.optimizer
        self._optimizer_number, self._first_slot = number, first_slot
        # Traced again, as it is to begin the new slots.
        for method in ("insert", "admit"):
            self._methods.pop(method, None)
        self._capturing = None

    def capture(self, key: int, since: files.Mark | None) -> files.Capture:
        """Table as it is now, or its changes since, to be written meanwhile."""
        if self._capturing is None:
            candidates = self.store.admission.candidates
            every = [self.store.key_rows, *([] if candidates is None else [candidates])]
            freeze = traced(tf.TensorSpec([3], _LONG))(
                lambda since: self._lock.execute(lambda: self.store.freeze(since))
            )
            self._capturing = freeze, [self._read_part(rows.frozen.read) for rows in every]
        return files.Capture(self.store, key, since, *self._capturing)

    def prepare_capture(self) -> None:
        """Traces and executes once what `capture` needs; training would wait for the first one."""
        if self._capturing is None:
            capture = self.capture(0, None)
            capture.warm_up()
            capture.close()

    def _makers(self) -> dict[str, Callable[[], Any]]:
        makers = super()._makers()
        makers["lookup"] = functools.partial(self._lookup_keys, False)
        makers["lookup_training"] = functools.partial(self._lookup_keys, True)
        makers["entries"] = lambda: self._read_part(self.store.entries)
        makers["insert"] = lambda: traced(_ENTRIES)(self.store.insert)
        makers["admit"] = lambda: traced(tf.TensorSpec([None, 2], _LONG))(
            lambda of: self.store.admit(of[:, 0], of[:, 1])
        )
        makers["remove"] = lambda: traced(tf.TensorSpec([None], _LONG))(self.store.remove)
        makers["steps"] = lambda: traced(tf.TensorSpec([], _INT))(
            lambda unused: self.store.clock.steps.read_value()
        )
        makers["removed"] = lambda: traced(tf.TensorSpec([2], _LONG))(
            lambda since: self._lock.execute(lambda: self.store.removed(since))
        )
        makers["changed"] = self._changed
        makers["clear"] = self._clear
        if self.store.admission.candidates is not None:
            makers["candidates"] = lambda: traced(*_RANGE)(self.store.candidates)
            makers["insert_candidates"] = lambda: traced(_ENTRIES)(self.store.insert_candidates)
        if (bloom := self.store.admission.filter) is not None:
            makers["filter"] = lambda: traced(*_RANGE)(
                lambda first, count: bloom.read_value()[first : first + count]
            )
            makers["set_filter"] = lambda: self._set_filter(bloom)
        for i, column in enumerate(self.store.columns):
            number = self._first_slot + i - 1 if i else 0
            makers[f"read{number}"] = functools.partial(self._read_range, column)
            makers[f"put{number}"] = functools.partial(self._put, i)
        return makers

    def _lookup_keys(self, trains: bool) -> Any:
        @traced(tf.TensorSpec([None], _LONG))
        def lookup(keys: tf.Tensor) -> tf.Tensor:
            def encoded() -> tf.Tensor:
                rows = self.store.lookup(keys, trains)
                return self._pull.encode(rows, self.version.read_value())

            # Beside an update, a key may have a row that is not written yet, or is another's.
            return encoded() if self._sync else self._lock.execute(encoded)

        return lookup

    def _apply(
        self, ids: tf.Tensor, gradient: tf.Tensor, numbers: tf.Tensor, iterations: tf.Tensor
    ) -> tf.Tensor:
        done = self.store.apply(ids, gradient, numbers[0], numbers[1:], iterations)
        with tf.control_dependencies([done]):
            return self.version.assign_add(1, read_value=True)

    def _read_part(self, read: Callable[..., tf.Tensor]) -> Any:
        # Beside an update, memory of rows may be given to a larger chunk.
        return traced(*_RANGE)(lambda *part: self._lock.execute(lambda: read(*part)))

    def _read_range(self, column: ChunkedRows) -> Any:
        def rows(first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
            end = tf.minimum(first + count, self.store.key_rows.next.read_value())
            return column.sparse_read(tf.range(first, end))

        return self._read_part(rows)

    def _put(self, slot: int) -> Any:
        @traced(tf.TensorSpec([None], _LONG), tf.TensorSpec([None, self.dim], _FLOAT))
        def put(keys: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
            return self.store.write(slot, keys, rows)

        return put

    def _changed(self) -> Any:
        most = MESSAGE_BYTES // (4 * (snapshot.HEAD + self.dim)) - 1

        @traced(tf.TensorSpec([2], _LONG), tf.TensorSpec([], _INT))
        def changed(since: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
            return self._lock.execute(lambda: self.store.changed(since, first, most))

        return changed

    def _clear(self) -> Any:
        @traced(tf.TensorSpec([], _LONG))
        def clear(steps: tf.Tensor) -> tf.Tensor:
            self.store.clear()
            return self.store.clock.steps.assign(steps, read_value=True)

        return clear

    def _set_filter(self, bloom: tf.Variable) -> Any:
        @traced(tf.TensorSpec([], _INT), tf.TensorSpec([None], tf.uint8))
        def write(first: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
            places = tf.range(first, first + tf.size(values))
            tf.raw_ops.ResourceScatterUpdate(resource=bloom.handle, indices=places, updates=values)
            return tf.size(values)

        return write
