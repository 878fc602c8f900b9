"""A dynamic table, or a slot of one, as a variable.

KeyedVariable    what Keras, layers and optimizers hold; of no rows, as far as shapes go
KeyedValue       its value, by which rows are looked up: `LocalTable`, or one on servers
Checkpointed     part of such values: what `tf.train.Checkpoint` has of them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import backend
from keras_psplus.tables.snapshot import Changes, Contents, Snapshot
from keras_psplus.tf_internals import framework_ops as ops

# Of a slot, in a checkpoint.
_ROWS = "rows"


@runtime_checkable
class KeyedValue(Protocol):
    """Value of a `KeyedVariable`."""

    # Arguments of its `RowStore`.
    spec: dict[str, Any]
    # 0 for the table itself, else the number of an optimizer's slot.
    slot: int

    def lookup_keys(self, keys: tf.Tensor, trains: bool) -> tf.Tensor:
        """Rows of an int64 vector of keys, with a gradient for the table."""

    def new_slot(self, optimizer: keras.optimizers.Optimizer, name: str) -> Any:
        """Value of one more slot of an optimizer."""

    def read_snapshot(self) -> Snapshot:
        """Contents of the table."""

    def read_changes(self, mark: Any) -> Changes:
        """Changes since the mark of an earlier look, or, with None, all of the table."""

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Sets the contents of the table."""

    def read_items(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Keys and rows of the table, so many at a time, in no order."""

    def edit(self, act: Callable[[Contents], None]) -> None:
        """Has a function change the contents of the table; of all workers, the chief does."""

    @property
    def slot_numbers(self) -> range:
        """Numbers of the present optimizer's slots of the table."""

    def read_rows(self) -> np.ndarray:
        """Rows of the table or slot, in the order of their keys."""

    def write_rows(self, rows: np.ndarray) -> None:
        """Sets the rows of the table or slot, in the order of their keys."""


class Checkpointed:
    """Has `tf.train.Checkpoint` write and read the keys with the rows of a `KeyedValue`."""

    def _serialize_to_tensors(self: Any) -> dict[str, tf.Tensor]:
        if self.slot:
            return {_ROWS: tf.constant(self.read_rows())}
        arrays = self.read_snapshot().arrays()
        return {name: tf.constant(array) for name, array in arrays.items()}

    def _restore_from_tensors(self: Any, restored_tensors: dict[str, tf.Tensor]) -> None:
        arrays = {name: tensor.numpy() for name, tensor in restored_tensors.items()}
        if self.slot:
            self.write_rows(arrays[_ROWS])
        else:
            self.write_snapshot(Snapshot.of_arrays(arrays, self.spec["dim"], self.spec["name"]))


class TableShape(tuple[int, ...]):
    """Shape of a table without rows, equal to that of any of its width.

    Keras compares it with what `set_weights` is given.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and len(other) == 2 and other[1] == self[1]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return super().__hash__()


class RowsOfKeys(np.ndarray):
    """Rows of a table, which know their keys: `set_weights` has both again.

    Attributes:
        snapshot: The table that they are of; None for rows that were computed from them.
    """

    snapshot: Snapshot | None

    def __array_finalize__(self, of: Any) -> None:
        self.snapshot = None

    @staticmethod
    def of(snapshot: Snapshot) -> RowsOfKeys:
        rows = snapshot.rows.view(RowsOfKeys)
        rows.snapshot = snapshot
        return rows


def parts_of(weight: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays for a file of a weight and its keys, by ends of names."""
    snapshot = weight.snapshot if isinstance(weight, RowsOfKeys) else None
    arrays = {} if snapshot is None else snapshot.arrays()
    return {"": np.asarray(weight), **{f"/{name}": array for name, array in arrays.items()}}


def rows_with_keys(weight: np.ndarray, arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """A weight as it was, of what `parts_of` has returned."""
    start = f"{name}/"
    own = {n.removeprefix(start): array for n, array in arrays.items() if n.startswith(start)}
    return RowsOfKeys.of(Snapshot.of_arrays(own, weight.shape[1], name)) if own else weight


class KeyedVariable(keras.Variable):
    """Keras variable of a dynamic table, or of a slot of its optimizer.

    Its shape is that of a table without rows, which never changes; `numpy` and `assign` are of all
    rows, in the order of their keys.

    Args:
        dim: Numbers in a row.
    """

    def __init__(
        self, make: Callable[[KeyedVariable], Any], dim: int, name: str, trainable: bool
    ) -> None:
        self._make_value: Callable[[KeyedVariable], Any] | None = make
        super().__init__(
            keras.initializers.Zeros(),
            shape=(0, dim),
            dtype="float32",
            trainable=trainable,
            autocast=False,
            name=name,
        )

    def _initialize_with_initializer(self, initializer: Any) -> None:
        assert self._make_value is not None
        make, self._make_value = self._make_value, None
        with tf.init_scope():
            self._value = make(self)

    @property
    def shape(self) -> TableShape:
        return TableShape(self._shape)

    def numpy(self) -> np.ndarray:
        """All rows, in the order of the keys."""
        if not is_keyed(self) or self._value.slot:
            return self._value.numpy()
        return RowsOfKeys.of(self._value.read_snapshot())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def assign(self, value: Any) -> Any:
        """Sets all rows, in the order of the keys.

        Those that `numpy` has returned bring their keys where there are others by now; slots of the
        optimizer begin again then.
        """
        if not is_keyed(self):
            return super().assign(value)
        snapshot = value.snapshot if isinstance(value, RowsOfKeys) else None
        if snapshot is not None and not self._value.slot:
            if not np.array_equal(snapshot.keys, self._value.read_snapshot().keys):
                self._value.write_snapshot(snapshot)
                return value
        self._value.write_rows(np.asarray(value, np.float32))
        return value


def is_keyed(variable: Any) -> bool:
    """Whether a variable, or its value, is a dynamic table or a slot."""
    return isinstance(getattr(variable, "_value", variable), KeyedValue)


def add_slot(
    optimizer: keras.optimizers.Optimizer, reference: KeyedVariable, name: str | None
) -> KeyedVariable:
    """Adds a slot for a dynamic table to an optimizer, in place of Keras's function."""
    value: Any = getattr(reference, "_value", reference)
    path = getattr(reference, "path", None) or reference.name
    full = f"{path.replace('/', '_')}_{name or 'var'}"
    with backend.name_scope(optimizer.name, caller=optimizer):
        slot = KeyedVariable(
            lambda _: value.new_slot(optimizer, full), value.shape[1], full, trainable=False
        )
    optimizer._track_variable(slot)
    return slot


def with_gradient(
    proxy: tf.Tensor,
    rows: tf.Tensor,
    unique: tf.Tensor,
    positions: tf.Tensor,
    table: tuple[str, int, int],
    kept: Callable[[tf.Tensor], tf.Tensor] = lambda rows: rows,
) -> tf.Tensor:
    """Gathers looked-up rows, with a gradient by keys for the variable that has the proxy.

    Args:
        proxy: Value of the variable that the tape watches.
        rows: Rows of the distinct keys, or numbers of rows.
        unique: int64 vector of these keys.
        positions: For each place, the index of its row in `rows`.
        table: Its name, rows as far as they are known, and numbers in a row.
        kept: Function of rows of the gradient that returns those that count.
    """

    @tf.custom_gradient
    def take(
        proxy: tf.Tensor, rows: tf.Tensor, unique: tf.Tensor, positions: tf.Tensor
    ) -> tuple[tf.Tensor, Callable[..., Any]]:
        def gradient(upstream: tf.Tensor) -> tuple[Any, ...]:
            _check_not_of_a_loop(table[0])
            # An int32, as TensorFlow gives to a branch of tf.cond without a lookup: both must have
            # one. Nobody reads it.
            whole = tf.constant([min(table[1], tf.int32.max), table[2]])
            summed = tf.math.unsorted_segment_sum(upstream, positions, tf.size(unique))
            # Of the gradient's graph, where a tape is around a function.
            keys = tf.identity(kept(unique))
            return tf.IndexedSlices(kept(summed), keys, whole), None, None, None

        return tf.gather(rows, positions), gradient

    return take(proxy, rows, unique, positions)


def _check_not_of_a_loop(name: str) -> None:
    """Raises ValueError if a gradient crosses a loop.

    TensorFlow would sum it up as a whole table.
    """
    graph = ops.get_default_graph()
    while graph is not None:
        if type(graph).__name__ == "_WhileBodyGradFuncGraph":
            raise ValueError(
                f"The table '{name}' is looked up inside a loop of the graph, through which its "
                "gradient cannot be sent by rows. Look all rows up before the loop, use a Python "
                "loop, or, if it is one of numbered rows on parameter servers, keep it on the "
                f'workers: `placement={{"{name}": "mirrored"}}`. '
                "Received: a lookup in tf.while_loop"
            )
        graph = getattr(graph, "outer_graph", None)
