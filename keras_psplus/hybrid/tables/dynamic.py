"""A dynamic table from a worker's side: keys in the place of row numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.compression import Compressor
from keras_psplus.hybrid.rows.row_codec import MESSAGE_BYTES
from keras_psplus.hybrid.rpc.calls import RpcClient
from keras_psplus.hybrid.rpc.servers import Servers
from keras_psplus.hybrid.tables.registry import Tables
from keras_psplus.hybrid.tables.table import Table
from keras_psplus.hybrid.tables.variable import TableVariable
from keras_psplus.tables import changes
from keras_psplus.tables.changes import Changes
from keras_psplus.tables.keys import BLOCKS, blocks_of, mixed
from keras_psplus.tables.local import check_rows
from keras_psplus.tables.row_variable import with_gradient
from keras_psplus.tables.snapshot import KEY, Snapshot, WaitingRows, in_chunks, living

_INT, _LONG, _FLOAT = tf.int32, tf.int64, tf.float32
# Entries in a message, of 32 bytes.
_ENTRIES = 1 << 16


class DynamicTable(Table):
    """Keys and rows that lie on parameter servers, shared out by hashes of the keys.

    Args:
        servers: `servers.Servers` of the job.
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
        # Rows of slots that came before their keys, as files have them.
        self._waiting = WaitingRows()

    def split(self, ids: tf.Tensor, *others: tf.Tensor) -> list[tuple[Any, ...]]:
        count = len(self.servers)
        if count == 1:
            return [(ids, *others, None)]
        owners = blocks_of(mixed(ids)) % count
        parts = [ids, *others, tf.range(tf.size(ids))]
        return list(zip(*(tf.dynamic_partition(part, owners, count) for part in parts)))

    def read(self, slot: int) -> np.ndarray:
        """Rows of the table, or of a slot, in the order of their keys."""
        with tf.init_scope():
            every, order = self._entries()
            return self._rows(slot, every, order)

    def _entries(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Entries of all servers' rows, and the order of the living ones by key."""
        every = [self._all(link, "entries", _LONG, 4, _ENTRIES) for link in self.links("whole")]
        together = np.concatenate(every)
        rows = np.flatnonzero(living(together))
        return every, rows[np.argsort(together[rows, KEY], kind="stable")]

    def _rows(self, slot: int, every: list[np.ndarray], order: np.ndarray) -> np.ndarray:
        most = MESSAGE_BYTES // (4 * self.dim)
        parts = []
        for link, entries in zip(self.links("whole"), every):
            rows = self._all(link, f"read{slot}", _FLOAT, self.dim, most)
            parts.append(rows[: len(entries)])
        return np.concatenate(parts)[order]

    def _all(
        self, link: RpcClient, what: str, dtype: tf.DType, columns: int, size: int
    ) -> np.ndarray:
        """All rows that a method of a server returns in parts."""

        def read(first: int, count: int) -> np.ndarray:
            args = [tf.constant(first, _INT), tf.constant(count, _INT)]
            return link.call(self.method(what), args, dtype, [None, columns]).numpy()

        return in_chunks(read, size)

    def write(self, slot: int, value: Any) -> None:
        """Sets the contents, a `Snapshot`, or the rows in the order of their keys."""
        with tf.init_scope():
            if isinstance(value, Snapshot):
                self._write_snapshot(value)
                return
            every, order = self._entries()
            keys, rows = np.concatenate(every)[order, KEY], np.asarray(value, np.float32)
            if slot:
                # A file's keys may come after its optimizer's variables.
                self._waiting.put(slot, rows, self._steps())
                if len(rows) != len(keys):
                    return
            check_rows(self.spec, rows, keys)
            self._put(slot, keys, rows)

    def snapshot(self) -> Snapshot:
        """Contents of the table."""
        with tf.init_scope():
            every, order = self._entries()
            candidates = np.zeros([0, 4], np.int64)
            links = self.links("whole")
            kind = (self.spec["admit"] or {}).get("kind")
            if kind == "Count":
                parts = [self._all(link, "candidates", _LONG, 4, _ENTRIES) for link in links]
                candidates = np.concatenate(parts)
                candidates = candidates[living(candidates)]
                candidates = candidates[np.argsort(candidates[:, KEY], kind="stable")]
            return Snapshot(
                np.concatenate(every)[order],
                self._rows(0, every, order),
                self._steps(),
                candidates,
                self._filter() if kind == "Bloom" else np.zeros([0, 0], np.uint8),
            )

    def changes(self, mark: Any) -> Changes:
        """Changes since the mark of an earlier look, or, with None, all of the table."""

        def functions(
            link: RpcClient,
        ) -> tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]:
            def removed(since: np.ndarray) -> np.ndarray:
                return link.call(
                    self.method("removed"), [tf.constant(since)], _LONG, [None]
                ).numpy()

            def changed(since: np.ndarray, first: int) -> np.ndarray:
                args = [tf.constant(since), tf.constant(first, _INT)]
                shape = [None, changes.HEAD + self.dim]
                return link.call(self.method("changed"), args, _FLOAT, shape).numpy()

            return removed, changed

        with tf.init_scope():
            return changes.read([functions(link) for link in self.links("whole")], mark, self.dim)

    def _steps(self) -> int:
        link = self.links("whole")[0]
        return int(link.call(self.method("steps"), [tf.constant(0)], _LONG, []).numpy())

    def _write_snapshot(self, snapshot: Snapshot) -> None:
        waiting = self._waiting.take(len(snapshot.keys), self._steps())
        for link in self.links("whole"):
            steps = tf.constant(snapshot.steps, _LONG)
            link.call(self.method("clear"), [steps], _LONG, []).numpy()
        for server, own in enumerate(self._by_server(snapshot.keys)):
            self._insert(server, "insert", snapshot.entries[own])
        self._put(0, snapshot.keys, snapshot.rows)
        for server, own in enumerate(self._by_server(snapshot.candidates[:, KEY])):
            self._insert(server, "insert_candidates", snapshot.candidates[own])
        if snapshot.filter.size and (self.spec["admit"] or {}).get("kind") == "Bloom":
            self._set_filter(snapshot.filter)
        for slot, rows in waiting:
            self._put(slot, snapshot.keys, rows)

    def _by_server(self, keys: np.ndarray) -> list[np.ndarray]:
        """Places of each server's keys."""
        owners = (blocks_of(mixed(tf.constant(keys, _LONG))) % len(self.servers)).numpy()
        return [np.flatnonzero(owners == server) for server in range(len(self.servers))]

    def _insert(self, server: int, what: str, entries: np.ndarray) -> None:
        link = self.links("whole")[server]
        for first in range(0, len(entries), _ENTRIES):
            args = [tf.constant(entries[first : first + _ENTRIES], _LONG)]
            link.call(self.method(what), args, _INT, []).numpy()

    def _put(self, slot: int, keys: np.ndarray, rows: np.ndarray) -> None:
        most = MESSAGE_BYTES // (4 * self.dim + self._id_bytes)
        for link, own in zip(self.links("whole"), self._by_server(keys)):
            for first in range(0, len(own), most):
                part = own[first : first + most]
                args = [tf.constant(keys[part], _LONG), tf.constant(rows[part], _FLOAT)]
                link.call(self.method(f"put{slot}"), args, _INT, []).numpy()

    def _filter(self) -> np.ndarray:
        servers = len(self.servers)
        parts = []
        for link in self.links("whole"):

            def read(first: int, count: int, link: RpcClient = link) -> np.ndarray:
                args = [tf.constant(first, _INT), tf.constant(count, _INT)]
                return link.call(self.method("filter"), args, tf.uint8, [None]).numpy()

            parts.append(in_chunks(read, MESSAGE_BYTES))
        size = sum(map(len, parts)) // BLOCKS
        blocks = np.empty([BLOCKS, size], np.uint8)
        for server, part in enumerate(parts):
            blocks[server::servers] = part.reshape(-1, size)
        return blocks

    def _set_filter(self, blocks: np.ndarray) -> None:
        for server, link in enumerate(self.links("whole")):
            own = blocks[server :: len(self.servers)].reshape(-1)
            for first in range(0, len(own), MESSAGE_BYTES):
                part = own[first : first + MESSAGE_BYTES]
                args = [tf.constant(first, _INT), tf.constant(part)]
                link.call(self.method("set_filter"), args, _INT, []).numpy()


class DynamicVariable(TableVariable):
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
        """Value of one more slot of an optimizer."""
        return self.of_slot(name, self.table.new_slot(optimizer))

    def of_slot(self, name: str, slot: int) -> DynamicVariable:
        return DynamicVariable(self.table, name, False, self._tables, self._lookup, slot)

    def read_snapshot(self) -> Snapshot:
        """Contents of the table."""
        return self.table.snapshot()

    def read_changes(self, mark: Any) -> Changes:
        """Changes since the mark of an earlier look, or, with None, all of the table."""
        return self.table.changes(mark)

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Sets the contents of the table; of all workers, the chief does."""
        self._tables.assign(self.table, 0, snapshot)

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
