"""Creation and lookups of Keras embeddings with tables on parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.hybrid.tables.placement import TablePlacement, TablePlacer, Tables
from keras_psplus.hybrid.tables.table import Table
from keras_psplus.keras_internals.keras_parts import (
    backend,
    global_state,
    layers,
    standardize_dtype,
    stateless_scope,
)
from keras_psplus.tables.row_variable import with_gradient
from keras_psplus.tf_internals import resource_variable_ops
from keras_psplus.tf_internals.composite_variable import CompositeVariable

# Tables as variables of Keras and of the tape, which are read by rows.


class TableVariable(CompositeVariable):
    """Variable for a table on parameter servers, or for a slot of its optimizer.

    Args:
        tables: `registry.Tables` of the job, with all workers of which it is assigned.
        lookup: Function of this variable and of ids that looks rows up, as a part of a step.
        slot: 0 for the table itself, else the number of the slot.
    """

    def __init__(
        self,
        table: Table,
        name: str,
        trainable: bool,
        tables: Tables,
        lookup: Callable[[TableVariable, tf.Tensor], tf.Tensor],
        slot: int = 0,
    ) -> None:
        self.table, self.slot, self._tables, self._lookup = table, slot, tables, lookup
        with tf.init_scope(), tf.device("/CPU:0"):
            # The tape knows the table by this.
            self._proxy = resource_variable_ops.ResourceVariable(
                tf.zeros([0, table.dim]), trainable=trainable, name=name
            )
        unique_id = f"keras_psplus_table_{table.key}_{slot}"
        super().__init__(trainable, [table.rows, table.dim], tf.float32, unique_id, name)

    @property
    def handle(self) -> tf.Tensor:
        return self._proxy.handle

    @property
    def device(self) -> str:
        return "/job:ps"

    def numpy(self) -> np.ndarray:
        """The whole of it; the servers send it in parts."""
        return self.table.read(self.slot)

    def value(self) -> tf.Tensor:
        if not tf.executing_eagerly():
            raise ValueError(
                f"The table '{self.table.name}' on parameter servers cannot be read whole inside a "
                "step, which reads tables by rows. Use `keras.ops.take`, or keep this variable on "
                f'the workers: `placement={{"{self.table.name}": "mirrored"}}`. '
                f"Received: a read of shape={tuple(self.shape)}"
            )
        return tf.constant(self.numpy())

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Looks rows up: each of them comes once, and no others do."""
        return self._lookup(self, indices)

    def assign(
        self,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Self:
        """Sets the whole of it; of all workers, the chief does."""
        if not tf.executing_eagerly():
            raise ValueError(
                f"The table '{self.table.name}' on parameter servers cannot be assigned inside a "
                f"step. Assign it outside of tf.function. Received: shape={tuple(self.shape)}"
            )
        self._tables.assign(self.table, self.slot, value)
        return self

    def note_followed(self) -> None:
        """Notes an assignment that only the chief has made."""
        self._tables.note_followed(self.table, self.slot)

    def of_slot(self, name: str, slot: int) -> TableVariable:
        return TableVariable(self.table, name, False, self._tables, self._lookup, slot)

    def __repr__(self) -> str:
        return f"<TableVariable '{self.table.name}' shape={tuple(self.shape)} slot={self.slot}>"

    def with_gradient(self, rows: tf.Tensor, unique: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        """Gathers looked-up rows, with a gradient for the table's rows.

        Args:
            rows: The values of the distinct rows.
            unique: int64 vector of their ids.
            positions: For each place, the index of its row in `rows`.
        """
        table = self.table.name, self.table.rows, self.table.dim
        return with_gradient(self._proxy.read_value(), rows, unique, positions, table)


# KerasRS's embedding, which sums what Keras's own has looked up.
_EMBED_REDUCE = "keras_rs.src.layers.embedding.embed_reduce.EmbedReduce.call"


class Slot:
    """An initializer for an optimizer's slot of a table, which its servers have made already."""

    def __init__(self, value: TableVariable, number: int) -> None:
        self._value, self._number = value, number

    def __call__(self, shape: Any, dtype: Any = None) -> tf.Tensor:
        return tf.zeros(shape, dtype)

    def variable(self, name: str) -> TableVariable:
        return self._value.of_slot(name, self._number)


def table_of(variable: keras.Variable | tf.Variable) -> Table | None:
    """The table that a Keras variable, or one of TensorFlow's, is, or None."""
    value = getattr(variable, "_value", variable)
    return value.table if isinstance(value, TableVariable) and not value.slot else None


def is_table(variable: keras.Variable) -> bool:
    """Whether a Keras variable is a table, or a slot of one."""
    return isinstance(variable._value, TableVariable)


def decide(
    placer: TablePlacer, shape: Sequence[int], name: str | None, dtype: Any
) -> TablePlacement | None:
    """Placement of the variable that a layer is creating; None if it is no table."""
    scopes = global_state.get_global_attribute("name_scope_stack")
    layer = scopes[-1].caller if scopes else None
    is_table = (
        isinstance(layer, layers.Embedding)
        and _reads_by_rows(type(layer).call)
        and name == "embeddings"
        and len(shape) == 2
        and standardize_dtype(dtype) == "float32"
    )
    if not is_table:
        return None
    path = f"{backend.common.name_scope.current_path()}/{name}"
    rows, dim = shape
    return placer.decide(path, rows, dim, getattr(layer, "_keras_rs_placement", None))


def make(
    tables: Tables,
    lookup: Callable[[TableVariable, tf.Tensor], tf.Tensor],
    variable: keras.Variable,
    decision: TablePlacement,
    initializer: Callable[..., tf.Tensor],
    cache: dict[str, int] | None,
) -> None:
    """Makes the table of a Keras variable on the servers; `lookup` is its `TableVariable`'s."""
    config = _serialized(initializer)
    table = tables.make(decision.path, (decision.rows, decision.dim), config, cache)
    variable._value = TableVariable(table, variable.path, variable.trainable, tables, lookup)
    if config is None:
        variable._value.assign(initializer(variable._shape, dtype=variable._dtype))
    _give_to_servers(variable)


def take_over(variable: keras.Variable) -> None:
    """Has the servers apply a table's regulariser and constraint, to the rows of a step."""
    variable._of_rows = variable.regularizer, variable.constraint
    variable.regularizer = variable.constraint = None
    _give_to_servers(variable)


def has_other_value(variable: keras.Variable) -> bool:
    """Whether a scope of Keras's gives a variable another value than its own."""
    scope = stateless_scope.get_stateless_scope() if stateless_scope.in_stateless_scope() else None
    return scope is not None and scope.get_current_value(variable) is not None


def _give_to_servers(variable: keras.Variable) -> None:
    # Either of the two may come first: the table, or what its layer wants done to rows.
    table = table_of(variable)
    if table is not None and hasattr(variable, "_of_rows"):
        table.regularizer, table.constraint = variable._of_rows


def _reads_by_rows(call: Callable[..., Any]) -> bool:
    return (
        call is layers.Embedding.call or f"{call.__module__}.{call.__qualname__}" == _EMBED_REDUCE
    )


def _serialized(initializer: Any) -> dict[str, Any] | None:
    """An initializer that the servers can make again, or None if they cannot."""
    if not isinstance(initializer, keras.initializers.Initializer):
        return None
    config = keras.initializers.serialize(initializer)
    if not isinstance(config, dict) or not (config.get("module") or "").startswith("keras."):
        return None
    seed = getattr(initializer, "seed", None)
    if isinstance(seed, int):
        # A seed that it has drawn is not in its own configuration.
        config["config"]["seed"] = seed
    elif seed is not None:
        return None
    return config
