"""A dynamic table in the memory of the one process that trains with it."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.engine import Engine
from keras_psplus.tables import changes
from keras_psplus.tables.changes import Changes
from keras_psplus.tables.row_variable import KeyedVariable, is_keyed, with_gradient
from keras_psplus.tables.rows.row_optimizer import check_elementwise, config_of, scalars_of
from keras_psplus.tables.snapshot import KEY, Snapshot, WaitingRows, in_chunks, living
from keras_psplus.tables.store import RowStore
from keras_psplus.tf_internals import resource_variable_ops
from keras_psplus.tf_internals.composite_variable import CompositeVariable

_CHUNK = 1 << 16
_numbers = itertools.count()
_engines: list[Engine] = []


def engine_in_use() -> Engine | None:
    """Engine of optimizers without a strategy, once there is a table in memory; else None."""
    return _engines[0] if _engines else None


class LocalTable(CompositeVariable):
    """Value of a `KeyedVariable` whose rows lie in this process.

    Args:
        spec: Of the `RowStore`.
        trainable: Whether it is trained.
        of: The table, for a slot of it.
        slot: 0 for the table itself, else the number of the slot.
    """

    def __init__(
        self, spec: dict[str, Any], trainable: bool, of: LocalTable | None = None, slot: int = 0
    ) -> None:
        if not _engines:
            _engines.append(Engine())
        self.spec, self.slot, self._of = spec, slot, of
        self.store: RowStore = outside(lambda: RowStore(spec)) if of is None else of.store
        self.optimizer: Any = None
        self._slots = 0
        # Rows that came before their keys, as files have them.
        self._waiting = WaitingRows()
        with tf.init_scope(), tf.device("/CPU:0"):
            # The tape knows the table by it.
            self._proxy = resource_variable_ops.ResourceVariable(
                tf.zeros([0, spec["dim"]]), trainable=trainable, name=spec["name"]
            )
        unique_id = f"keras_psplus_dynamic_table_{next(_numbers)}"
        super().__init__(trainable, [0, spec["dim"]], tf.float32, unique_id, spec["name"])

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
        """Rows of an int64 vector of keys, with a gradient for the table."""
        unique, positions = tf.unique(keys)
        rows = tf.stop_gradient(self.store.lookup(unique, trains))
        table = self.spec["name"], tf.int32.max, self.spec["dim"]
        return with_gradient(self._proxy.read_value(), rows, unique, positions, table)

    # Optimizers.

    def set_optimizer(
        self, optimizer: keras.optimizers.Optimizer, weight_decay: float | None
    ) -> None:
        """Gives the table the optimizer that updates it from now on.

        Raises:
            ValueError: If it cannot.
        """
        if self.optimizer is optimizer:
            return
        # Also where a step that is traced builds it.
        with tf.init_scope():
            config = config_of(optimizer, weight_decay, None, None)
            outside(lambda: check_elementwise(config))
            outside(lambda: self.store.set_optimizer(config))
        self.optimizer, self._slots = optimizer, 0

    def new_slot(self, optimizer: keras.optimizers.Optimizer, name: str) -> LocalTable:
        """Value of one more slot of an optimizer."""
        self._slots += 1
        return LocalTable(dict(self.spec, name=name), False, self, self._slots)

    def apply_gradient(
        self, optimizer: Any, gradient: tf.IndexedSlices, learning_rate: Any
    ) -> None:
        """Updates the rows of a gradient's keys, no two of which are equal."""
        if self.optimizer is not optimizer:
            raise ValueError(
                f"The table '{self.spec['name']}' is updated by another optimizer, and has one at "
                "a time. Compile the model again before it trains on. "
                f"Received: {optimizer.name} beside {self.optimizer and self.optimizer.name}"
            )
        scalars = [tf.cast(tf.convert_to_tensor(v), tf.float32) for v in scalars_of(optimizer)]
        self.store.apply(
            gradient.indices,
            tf.cast(gradient.values, tf.float32),
            tf.cast(tf.convert_to_tensor(learning_rate), tf.float32),
            tf.stack(scalars) if scalars else tf.zeros([0]),
            tf.cast(tf.convert_to_tensor(optimizer._iterations), tf.int64),
        )

    # Contents.

    def _entries(self) -> tuple[np.ndarray, np.ndarray]:
        """Entries of all rows in the order of their keys, and their row numbers."""
        entries = in_chunks(lambda i, n: self.store.entries(i, n).numpy(), _CHUNK)
        rows = np.flatnonzero(living(entries))
        rows = rows[np.argsort(entries[rows, KEY], kind="stable")]
        return entries[rows], rows

    def read_rows(self) -> np.ndarray:
        """Rows of the table or slot, in the order of their keys."""
        return self._gather(self._entries()[1])

    def _gather(self, rows: np.ndarray) -> np.ndarray:
        variable = self.store.slots[self.slot - 1] if self.slot else self.store.weights
        return variable.sparse_read(tf.constant(rows, tf.int32)).numpy()

    def write_rows(self, rows: np.ndarray) -> None:
        """Sets the rows of the table or slot, in the order of their keys."""
        keys = self._entries()[0][:, KEY]
        if self._of is not None:
            # A file's keys may come after its optimizer's variables.
            self._of._waiting.put(self.slot, rows, self.store.clock.steps.numpy())
            if len(rows) != len(keys):
                return
        check_rows(self.spec, rows, keys)
        self.store.write(self.slot, tf.constant(keys), tf.constant(rows))

    def read_snapshot(self) -> Snapshot:
        """Contents of the table."""
        entries, rows = self._entries()
        candidates, filter_ = self.store.counters()
        return Snapshot(
            entries, self._gather(rows), int(self.store.clock.steps.numpy()), candidates, filter_
        )

    def read_changes(self, mark: Any) -> Changes:
        """Changes since a mark, or all of the table."""
        store = self.store

        def changed(since: np.ndarray, first: int) -> np.ndarray:
            return store.changed(tf.constant(since), tf.constant(first), _CHUNK).numpy()

        def removed(since: np.ndarray) -> np.ndarray:
            return store.removed(tf.constant(since)).numpy()

        return changes.read([(removed, changed)], mark, store.dim)

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Sets the contents of the table."""
        waiting = self._waiting.take(len(snapshot.keys), self.store.clock.steps.numpy())
        self.store.clear()
        self.store.clock.steps.assign(snapshot.steps)
        for first in range(0, len(snapshot.keys), _CHUNK):
            part = slice(first, first + _CHUNK)
            self.store.insert(tf.constant(snapshot.entries[part]))
            self.store.write(0, tf.constant(snapshot.keys[part]), tf.constant(snapshot.rows[part]))
        self.store.set_counters(snapshot.candidates, snapshot.filter)
        for slot, rows in waiting:
            if slot <= len(self.store.slots):
                self.store.write(slot, tf.constant(snapshot.keys), tf.constant(rows))


def outside(function: Callable[[], Any]) -> Any:
    """Calls a function outside of any strategy's scope, which a thread of its own is."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def check_rows(spec: dict[str, Any], rows: np.ndarray, keys: np.ndarray) -> None:
    """Raises ValueError if rows of an array do not go with keys."""
    if rows.shape != (len(keys), spec["dim"]):
        raise ValueError(
            f"The table '{spec['name']}' has {len(keys)} keys with rows of {spec['dim']} numbers: "
            "an array must have as many, in the order of the keys. "
            f"Received: an array of shape {rows.shape}"
        )


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
    """Those variables that are tables in this process's memory."""
    return [v for v in variables if isinstance(getattr(v, "_value", v), LocalTable)]


def build(optimizer: keras.optimizers.Optimizer, variables: Any) -> None:
    """Gives the tables in memory among variables an optimizer that is being built.

    Raises:
        ValueError: If the optimizer cannot be applied to rows, or two tables have one name.
    """
    check_names(variables)
    for variable in in_memory(variables):
        decays = optimizer.weight_decay and optimizer._use_weight_decay(variable)
        decay = optimizer.weight_decay if decays else None
        variable._value.set_optimizer(optimizer, decay)


def check_names(variables: Any) -> None:
    """Raises ValueError if two dynamic tables of one model have the same name."""
    paths = [variable.path for variable in variables if is_keyed(variable)]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise ValueError(
            "Two tables of a model have one name, by which files tell them apart. Give their "
            f"layers different `name`s. Received: {', '.join(twice)}"
        )
