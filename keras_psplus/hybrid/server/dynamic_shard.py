"""One parameter server's keys and rows of a dynamic table, beside those of other tables."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_psplus.hybrid.rows import MESSAGE_BYTES
from keras_psplus.hybrid.server.shard import TableShard, traced
from keras_psplus.tables import files, snapshot
from keras_psplus.tables.chunks import ChunkedRows, FrozenRows
from keras_psplus.tables.store import RowStore

_INT, _LONG, _FLOAT = tf.int32, tf.int64, tf.float32
_RANGE = tf.TensorSpec([], _INT), tf.TensorSpec([], _INT)
_ENTRIES = tf.TensorSpec([None, 4], _LONG)


class DynamicShard(TableShard):
    """Keys and rows of one dynamic table, with the optimizer that updates them.

    Workers name rows by keys; gradients are summed, applied and answered as a table's are.
    """

    _ids = _LONG

    def _make_rows(self, server: int, servers: int, keeps_undo_log: bool) -> None:
        self.store = RowStore(self.spec, server, servers)
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
        """Table as it is now, to be written while updates go on.

        Args:
            key: Its number in the files.
            since: Mark of the capture whose changes since are wanted, or None.
        """
        if self._capturing is None:
            candidates = self.store.admission.candidates
            every = [self.store.key_rows, *([] if candidates is None else [candidates])]
            self._capturing = self._freezing(), [self._reading(rows.frozen) for rows in every]
        return files.Capture(self.store, key, since, *self._capturing)

    def prepare_capture(self) -> None:
        """Traces and executes once what `capture` needs; training would wait for the first one."""
        if self._capturing is None:
            capture = self.capture(0, None)
            capture.warm_up()
            capture.close()

    def _freezing(self) -> files.Freeze:
        @traced(tf.TensorSpec([3], _LONG))
        def freeze(since: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return self._lock.execute(lambda: self.store.freeze(since))

        return freeze

    def _reading(self, frozen: FrozenRows) -> files.Read:
        @traced(*_RANGE)
        def read(first: tf.Tensor, end: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return self._lock.execute(lambda: frozen.read(first, end))

        return read

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
        makers["steps"] = self._steps
        makers["removed"], makers["changed"] = self._removed, self._changed
        makers["clear"] = self._clear
        if self.store.admission.candidates is not None:
            makers["candidates"] = lambda: traced(*_RANGE)(self.store.candidates)
            makers["insert_candidates"] = lambda: traced(_ENTRIES)(self.store.insert_candidates)
        if self.store.admission.filter is not None:
            makers["filter"] = self._filter
            makers["set_filter"] = self._set_filter
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

    def _steps(self) -> Any:
        @traced(tf.TensorSpec([], _INT))
        def steps(unused: tf.Tensor) -> tf.Tensor:
            return self.store.clock.steps.read_value()

        return steps

    def _removed(self) -> Any:
        @traced(tf.TensorSpec([2], _LONG))
        def removed(since: tf.Tensor) -> tf.Tensor:
            return self._lock.execute(lambda: self.store.removed(since))

        return removed

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

    @property
    def _bloom_filter(self) -> tf.Variable:
        assert self.store.admission.filter is not None
        return self.store.admission.filter

    def _filter(self) -> Any:
        filter_ = self._bloom_filter

        @traced(*_RANGE)
        def read(first: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
            return filter_.read_value()[first : first + count]

        return read

    def _set_filter(self) -> Any:
        filter_ = self._bloom_filter

        @traced(tf.TensorSpec([], _INT), tf.TensorSpec([None], tf.uint8))
        def write(first: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
            places = tf.range(first, first + tf.size(values))
            tf.raw_ops.ResourceScatterUpdate(
                resource=filter_.handle, indices=places, updates=values
            )
            return tf.size(values)

        return write
