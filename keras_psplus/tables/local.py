"""A dynamic table of one process: in its memory, or on devices that it reaches."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.cluster.process.memory import keep_freed_memory
from keras_psplus.engine import Engine
from keras_psplus.tables import files
from keras_psplus.tables import snapshot as changes
from keras_psplus.tables.row_optimizer import (
    check_elementwise,
    config_of,
    scalars_of,
    weight_decay_of,
)
from keras_psplus.tables.row_variable import Checkpointed, KeyedVariable, is_keyed, with_gradient
from keras_psplus.tables.snapshot import Changes, Contents, Snapshot, in_chunks
from keras_psplus.tables.store import RowStore
from keras_psplus.tf_internals import resource_variable_ops
from keras_psplus.tf_internals.composite_variable import CompositeVariable

_CHUNK = 1 << 16
_numbers = itertools.count()
_engines: list[Engine] = []


def engine_in_use() -> Engine | None:
    """Engine of optimizers without a strategy, once there is a table in memory; else None."""
    return _engines[0] if _engines else None


class LocalTable(Checkpointed, CompositeVariable):
    """Value of a `KeyedVariable` whose rows lie in this process.

    Args:
        spec: Of the `RowStore`s.
        of: The table, for a slot of it.
        slot: 0 for the table itself, else the number of the slot.
    """

    # Of the stores that share the keys.
    devices: Sequence[str] = ("/CPU:0",)

    def __init__(
        self, spec: dict[str, Any], trainable: bool, of: LocalTable | None = None, slot: int = 0
    ) -> None:
        if not _engines:
            _engines.append(Engine())
            # Each step has rows and slots of its keys in new blocks, whose pages the kernel clears.
            keep_freed_memory()
        self.spec, self.slot, self._of = spec, slot, of
        self.stores: list[RowStore] = [] if of is None else of.stores
        self.optimizer: Any = None
        self._slots = 0
        self._contents: Contents = Contents(spec, self._parts) if of is None else of._contents
        with tf.init_scope(), tf.device(self.devices[0]):
            # The tape knows the table by it.
            self._proxy = resource_variable_ops.ResourceVariable(
                tf.zeros([0, spec["dim"]]), trainable=trainable, name=spec["name"]
            )
        unique_id = f"keras_psplus_dynamic_table_{next(_numbers)}"
        super().__init__(trainable, [0, spec["dim"]], tf.float32, unique_id, spec["name"])
        if of is None:
            outside(self._make_stores)

    def _make_stores(self) -> None:
        for i, device in enumerate(self.devices):
            with tf.device(device):
                self.stores.append(RowStore(self.spec, i, len(self.devices)))

    @property
    def handle(self) -> tf.Tensor:
        return self._proxy.handle

    @property
    def device(self) -> str:
        return self._proxy.device

    def value(self) -> tf.Tensor:
        if not tf.executing_eagerly():
            raise ValueError(
                f"The table '{self.spec['name']}' has any number of rows and cannot be read whole "
                "inside a step. Call its layer. Received: a read of the variable"
            )
        return tf.constant(self.numpy())

    def numpy(self) -> np.ndarray:
        return self.read_rows()

    def lookup_keys(self, keys: tf.Tensor, trains: bool) -> tf.Tensor:
        unique, positions = tf.unique(keys)
        rows = tf.stop_gradient(self._lookup(unique, trains))
        table = self.spec["name"], tf.int32.max, self.spec["dim"]
        return with_gradient(self._proxy.read_value(), rows, unique, positions, table)

    def _lookup(self, keys: tf.Tensor, trains: bool) -> tf.Tensor:
        return self.stores[0].lookup(keys, trains)

    # Optimizers.

    def set_optimizer(
        self, optimizer: keras.optimizers.Optimizer, weight_decay: float | None
    ) -> None:
        """Gives the table the optimizer that updates it from now on."""
        if self.optimizer is optimizer:
            return
        # Also where a step that is traced builds it.
        with tf.init_scope():
            config = config_of(optimizer, weight_decay, None, None)
            outside(lambda: check_elementwise(config))
            for part in self._parts():
                part.set_optimizer(config)
        self.optimizer, self._slots = optimizer, 0

    def new_slot(self, optimizer: keras.optimizers.Optimizer, name: str) -> LocalTable:
        self._slots += 1
        return type(self)(dict(self.spec, name=name), False, self, self._slots)

    def apply_gradient(self, optimizer: Any, gradient: Any, learning_rate: Any) -> None:
        """Updates the rows of a gradient's keys, no two of which are equal."""
        self._apply(gradient, *self.numbers(optimizer, learning_rate))

    def numbers(self, optimizer: Any, learning_rate: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """The learning rate and an optimizer's scalars, and its iterations, as of now."""
        if self.optimizer is not optimizer:
            raise ValueError(
                f"The table '{self.spec['name']}' is updated by another optimizer, and has one at "
                "a time. Compile the model again before it trains on. "
                f"Received: {optimizer.name} beside {self.optimizer and self.optimizer.name}"
            )
        scalars = [learning_rate, *scalars_of(optimizer)]
        return (
            tf.stack([tf.cast(tf.convert_to_tensor(v), tf.float32) for v in scalars]),
            tf.cast(tf.convert_to_tensor(optimizer._iterations), tf.int64),
        )

    def _apply(self, gradient: tf.IndexedSlices, numbers: tf.Tensor, iterations: tf.Tensor) -> None:
        values = tf.cast(gradient.values, tf.float32)
        self.stores[0].apply(gradient.indices, values, numbers[0], numbers[1:], iterations)

    # Contents.

    def _parts(self) -> list[_StorePart]:
        return [_StorePart(*one) for one in zip(self.stores, self.devices)]

    def read_rows(self) -> np.ndarray:
        return self._contents.read(self.slot)

    def write_rows(self, rows: np.ndarray) -> None:
        self._contents.write(self.slot, rows)

    def read_snapshot(self) -> Snapshot:
        return self._contents.snapshot()

    def write_snapshot(self, snapshot: Snapshot) -> None:
        self._contents.write(0, snapshot)

    def read_items(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return self._contents.items(batch)

    def edit(self, act: Callable[[Contents], None]) -> None:
        act(self._contents)

    @property
    def slot_numbers(self) -> range:
        return range(1, 1 + self._slots)

    def read_changes(self, mark: Any) -> Changes:
        """Changes since a mark, or all of the table."""
        servers = [(part.removed, part.changed) for part in self._parts()]
        return changes.read(servers, mark, self.spec["dim"])

    def read_files(self, chains: Sequence[Sequence[str]], key: int, slots: int) -> None:
        """Reads what the servers of another job have written, as `files.load`."""
        count = len(self.stores)
        for i, part in enumerate(self._parts()):
            part.load(chains, key, slots, i, count)


class _StorePart:
    """`snapshot.Part` of a store that this process reaches."""

    def __init__(self, store: RowStore, device: str) -> None:
        self._store, self._device = store, device

    def on(self, function: Callable[[RowStore], Any]) -> Any:
        """Calls a function of the store, where that is."""
        with tf.init_scope(), tf.device(self._device):
            return function(self._store)

    def set_optimizer(self, config: dict[str, Any]) -> None:
        outside(lambda: self.on(lambda store: store.set_optimizer(config)))

    def load(self, *args: Any) -> None:
        self.on(lambda store: files.load(store, *args))

    def steps(self) -> int:
        return self.on(lambda store: int(store.clock.steps.numpy()))

    def entries(self) -> np.ndarray:
        return self.on(lambda store: in_chunks(lambda i, n: store.entries(i, n).numpy(), _CHUNK))

    def rows(self, slot: int, count: int) -> np.ndarray:
        return self.on(lambda store: store.columns[slot].sparse_read(tf.range(count)).numpy())

    def counters(self) -> tuple[np.ndarray, np.ndarray]:
        return self.on(RowStore.counters)

    def clear(self, steps: int) -> None:
        self.on(RowStore.clear)
        self.on(lambda store: store.clock.steps.assign(steps))

    def insert(self, entries: np.ndarray) -> None:
        def insert(store: RowStore) -> None:
            for first in range(0, len(entries), _CHUNK):
                store.insert(tf.constant(entries[first : first + _CHUNK]))

        self.on(insert)

    def admit(self, keys: np.ndarray, counts: np.ndarray) -> None:
        self.on(lambda store: store.admit(tf.constant(keys), tf.constant(counts)))

    def remove(self, keys: np.ndarray) -> None:
        self.on(lambda store: store.remove(tf.constant(keys)))

    def stretch(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        def read(store: RowStore) -> tuple[np.ndarray, np.ndarray]:
            entries = store.entries(first, count).numpy()
            return entries, store.weights.sparse_read(tf.range(first, first + len(entries))).numpy()

        return self.on(read)

    def put(self, slot: int, keys: np.ndarray, rows: np.ndarray) -> None:
        def put(store: RowStore) -> None:
            # A file may have slots of another optimizer.
            for first in range(0, len(keys) if slot < len(store.columns) else 0, _CHUNK):
                part = slice(first, first + _CHUNK)
                store.write(slot, tf.constant(keys[part]), tf.constant(rows[part]))

        self.on(put)

    def set_counters(self, candidates: np.ndarray, blocks: np.ndarray) -> None:
        self.on(lambda store: store.set_counters(candidates, blocks))

    # For `changes.read`.

    def removed(self, since: np.ndarray) -> np.ndarray:
        return self.on(lambda store: store.removed(tf.constant(since)).numpy())

    def changed(self, since: np.ndarray, first: int) -> np.ndarray:
        args = tf.constant(since), tf.constant(first), _CHUNK
        return self.on(lambda store: store.changed(*args).numpy())


def outside(function: Callable[[], Any]) -> Any:
    """Calls a function outside of any strategy's scope, which a thread of its own is."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def update(
    optimizer: keras.optimizers.Optimizer, grads: Any, variables: Any, learning_rate: Any
) -> tuple[list[Any], list[Any]]:
    """Updates the tables in memory among variables; returns the other gradients and variables."""
    others = []
    for gradient, variable in zip(grads, variables):
        value = getattr(variable, "_value", variable)
        if isinstance(value, LocalTable):
            value.apply_gradient(optimizer, gradient, learning_rate)
        else:
            others.append((gradient, variable))
    return [gradient for gradient, _ in others], [variable for _, variable in others]


def in_memory(variables: Any) -> list[KeyedVariable]:
    return [v for v in variables if isinstance(getattr(v, "_value", v), LocalTable)]


def build(optimizer: keras.optimizers.Optimizer, variables: Any) -> None:
    """Gives the tables in memory among variables an optimizer that is being built.

    Raises:
        ValueError: If the optimizer cannot be applied to rows, or two tables have one name.
    """
    check_names(variables)
    for variable in in_memory(variables):
        variable._value.set_optimizer(optimizer, weight_decay_of(optimizer, variable))


def check_names(variables: Any) -> None:
    """Raises ValueError if two dynamic tables of one model have the same name."""
    paths = [variable.path for variable in variables if is_keyed(variable)]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise ValueError(
            "Two tables of a model have one name, by which files tell them apart. Give their "
            f"layers different `name`s. Received: {', '.join(twice)}"
        )
