"""A dynamic table from a worker's side: keys in the place of row numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.compression import Compressor
from keras_psplus.hybrid.calls import RpcClient, group_of
from keras_psplus.hybrid.rows import MESSAGE_BYTES, RowCodec
from keras_psplus.hybrid.servers import Servers
from keras_psplus.hybrid.tables.embeddings import TableVariable
from keras_psplus.hybrid.tables.placement import Tables
from keras_psplus.hybrid.tables.table import Table
from keras_psplus.tables import snapshot as changes
from keras_psplus.tables.admission import counters_of_block
from keras_psplus.tables.keys import BLOCKS, owners_of
from keras_psplus.tables.row_variable import Checkpointed, with_gradient
from keras_psplus.tables.snapshot import Changes, Contents, Snapshot, in_chunks, living

_INT, _LONG, _FLOAT = tf.int32, tf.int64, tf.float32
# Entries in a message, of 32 bytes.
_ENTRIES = 1 << 16


class DynamicTable(Table):
    """Keys and rows that lie on parameter servers, shared out by hashes of the keys.

    Args:
        spec: Dict with the table's `key` (its number), `name` and `dim`, and what a `RowStore` has.
        pull_compressor: Compressor of rows that are read, or None.
        push_compressor: Compressor of gradients, or None.
    """

    _id_bytes = 10

    def __init__(
        self,
        servers: Servers,
        spec: dict[str, Any],
        pull_compressor: Compressor | None,
        push_compressor: Compressor | None,
    ) -> None:
        shape = 0, spec["dim"]
        super().__init__(
            servers, spec["key"], spec["name"], shape, pull_compressor, push_compressor
        )
        self.spec = spec
        self.pull_codec = RowCodec.of_pulls(pull_compressor, spec, self._id_bytes)
        # Of the copies of rows on workers.
        self.constraint = keras.constraints.get(spec.get("constraint"))
        self.regularizer = keras.regularizers.get(spec.get("regularizer"))
        self.contents = Contents(spec, self._parts)
        self._groups = {"training"}  # Which servers serve.

    def split(self, ids: tf.Tensor, *others: tf.Tensor) -> list[tuple[Any, ...]]:
        count = len(self.servers)
        if count == 1:
            return [(ids, *others, None)]
        owners = owners_of(ids, count)
        parts = [ids, *others, tf.range(tf.size(ids))]
        return list(zip(*(tf.dynamic_partition(part, owners, count) for part in parts)))

    def method(self, what: str) -> str:
        group = group_of(what)
        if group not in self._groups:
            self.servers.serve(self.key, group)
            self._groups.add(group)
        return super().method(what)

    def _parts(self) -> list[_ServerPart]:
        return [_ServerPart(self, *one) for one in enumerate(self.links("whole"))]

    def read(self, slot: int) -> np.ndarray:
        """Rows of the table, or of a slot, in the order of their keys."""
        with tf.init_scope():
            return self.contents.read(slot)

    def write(self, slot: int, value: Any) -> None:
        """Sets the contents, a `Snapshot`, or the rows in the order of their keys."""
        with tf.init_scope():
            if not isinstance(value, Snapshot):
                value = np.asarray(value, np.float32)
            self.contents.write(slot, value)

    def snapshot(self) -> Snapshot:
        with tf.init_scope():
            return self.contents.snapshot()

    def changes(self, mark: Any) -> Changes:
        """Changes since the mark of an earlier look, or, with None, all of the table."""
        with tf.init_scope():
            servers = [(part.removed, part.changed) for part in self._parts()]
            return changes.read(servers, mark, self.dim)


class _ServerPart:
    """`snapshot.Part` of a server, which is called."""

    def __init__(self, table: DynamicTable, server: int, link: RpcClient) -> None:
        self._table, self._server, self._link = table, server, link
        self._dim = table.dim
        self._admits_by = (table.spec["admit"] or {}).get("kind")

    def _call(self, what: str, args: list[Any], dtype: tf.DType, shape: list[Any]) -> Any:
        return self._link.call(self._table.method(what), args, dtype, shape).numpy()

    def _all(self, what: str, dtype: tf.DType, shape: list[Any], size: int) -> np.ndarray:
        """All rows that a method of the server returns in parts."""

        def read(first: int, count: int) -> np.ndarray:
            args = [tf.constant(first, _INT), tf.constant(count, _INT)]
            return self._call(what, args, dtype, shape)

        return in_chunks(read, size)

    def steps(self) -> int:
        return int(self._call("steps", [tf.constant(0)], _LONG, []))

    def entries(self) -> np.ndarray:
        return self._all("entries", _LONG, [None, 4], _ENTRIES)

    def rows(self, slot: int, count: int) -> np.ndarray:
        most = MESSAGE_BYTES // (4 * self._dim)
        return self._all(f"read{slot}", _FLOAT, [None, self._dim], most)[:count]

    def counters(self) -> tuple[np.ndarray, np.ndarray]:
        candidates, blocks = np.zeros([0, 4], np.int64), np.zeros([0, 0], np.uint8)
        if self._admits_by == "Count":
            candidates = self._all("candidates", _LONG, [None, 4], _ENTRIES)
            candidates = candidates[living(candidates)]
        elif self._admits_by == "Bloom":
            blocks = self._all("filter", tf.uint8, [None], MESSAGE_BYTES)
            count = len(range(self._server, BLOCKS, len(self._table.servers)))
            blocks = blocks.reshape(count, -1)
        return candidates, blocks

    def clear(self, steps: int) -> None:
        self._call("clear", [tf.constant(steps, _LONG)], _LONG, [])

    def insert(self, entries: np.ndarray, what: str = "insert") -> None:
        for first in range(0, len(entries), _ENTRIES):
            args = [tf.constant(entries[first : first + _ENTRIES], _LONG)]
            self._call(what, args, _INT, [])

    def admit(self, keys: np.ndarray, counts: np.ndarray) -> None:
        self.insert(np.stack([keys, counts], 1), "admit")

    def remove(self, keys: np.ndarray) -> None:
        self.insert(keys, "remove")

    def stretch(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        part = [tf.constant(first), tf.constant(min(count, MESSAGE_BYTES // (4 * self._dim)))]
        entries = self._call("entries", part, _LONG, [None, 4])
        return entries, self._call("read0", part, _FLOAT, [None, self._dim])

    def put(self, slot: int, keys: np.ndarray, rows: np.ndarray) -> None:
        most = MESSAGE_BYTES // (4 * self._dim + self._table._id_bytes)
        for first in range(0, len(keys), most):
            part = slice(first, first + most)
            args = [tf.constant(keys[part], _LONG), tf.constant(rows[part], _FLOAT)]
            self._call(f"put{slot}", args, _INT, [])

    def set_counters(self, candidates: np.ndarray, blocks: np.ndarray) -> None:
        # A file may have counts of another policy.
        if self._admits_by == "Count":
            self.insert(candidates, "insert_candidates")
        admit, own = self._table.spec["admit"] or {}, blocks.reshape(-1)
        is_own = self._admits_by == "Bloom" and blocks.shape[1:] == (counters_of_block(admit),)
        for first in range(0, len(own) if is_own else 0, MESSAGE_BYTES):
            args = [tf.constant(first, _INT), tf.constant(own[first : first + MESSAGE_BYTES])]
            self._call("set_filter", args, _INT, [])

    # For `changes.read`.

    def removed(self, since: np.ndarray) -> np.ndarray:
        return self._call("removed", [tf.constant(since)], _LONG, [None])

    def changed(self, since: np.ndarray, first: int) -> np.ndarray:
        args = [tf.constant(since), tf.constant(first, _INT)]
        return self._call("changed", args, _FLOAT, [None, changes.HEAD + self._dim])


class DynamicVariable(Checkpointed, TableVariable):
    """Value of a `KeyedVariable` whose rows lie on parameter servers."""

    table: Any

    @property
    def spec(self) -> dict[str, Any]:
        return self.table.spec

    def lookup_keys(self, keys: tf.Tensor, trains: bool) -> tf.Tensor:
        """Rows of an int64 vector of keys, with a gradient for the table."""
        lookup: Any = self._lookup
        return lookup(self, keys, trains)

    def new_slot(self, optimizer: keras.optimizers.Optimizer, name: str) -> DynamicVariable:
        return self.of_slot(name, self.table.new_slot(optimizer))

    def of_slot(self, name: str, slot: int) -> DynamicVariable:
        return DynamicVariable(self.table, name, False, self._tables, self._lookup, slot)

    def read_snapshot(self) -> Snapshot:
        return self.table.snapshot()

    def read_changes(self, mark: Any) -> Changes:
        """Changes since the mark of an earlier look, or, with None, all of the table."""
        return self.table.changes(mark)

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Sets the contents of the table; of all workers, the chief does."""
        self._tables.assign(self.table, 0, snapshot)

    def read_items(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return self.table.contents.items(batch)

    def edit(self, act: Callable[[Contents], None]) -> None:
        self._tables.edit(self.table, lambda: act(self.table.contents))

    @property
    def slot_numbers(self) -> range:
        first = self.table.slots + 1 - self.table.slots_in_use
        return range(first, self.table.slots + 1)

    def read_rows(self) -> np.ndarray:
        """Rows of the table or slot, in the order of their keys."""
        return self.table.read(self.slot)

    def write_rows(self, rows: np.ndarray) -> None:
        """Sets the rows of the table or slot, in the order of their keys."""
        self._tables.assign(self.table, self.slot, rows)

    def with_key_gradient(
        self,
        rows: tf.Tensor,
        unique: tf.Tensor,
        positions: tf.Tensor,
        kept: Callable[[tf.Tensor], tf.Tensor],
    ) -> tf.Tensor:
        """Gathers looked-up rows, as `row_variable.with_gradient`."""
        proxy = self._proxy.read_value()
        table = self.table.name, tf.int32.max, self.table.dim
        return with_gradient(proxy, rows, unique, positions, table, kept)


def make(
    tables: Tables, lookup: Callable[..., tf.Tensor], spec: dict[str, Any], trainable: bool
) -> DynamicVariable:
    """Makes a dynamic table on the servers, and the value of its variable."""
    table = tables.make_dynamic(spec, DynamicTable)
    return DynamicVariable(table, spec["name"], trainable, tables, lookup)
