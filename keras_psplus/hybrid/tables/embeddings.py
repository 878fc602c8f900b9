"""Creation and lookups of Keras embeddings with tables on parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.hybrid.tables.placement import TablePlacement, TablePlacer
from keras_psplus.hybrid.tables.registry import Tables
from keras_psplus.hybrid.tables.table import Table
from keras_psplus.hybrid.tables.variable import TableVariable
from keras_psplus.keras_internals.keras_parts import (
    backend,
    global_state,
    layers,
    standardize_dtype,
    stateless_scope,
)

# KerasRS's embedding, which sums what Keras's own has looked up.
_EMBED_REDUCE = "keras_rs.src.layers.embedding.embed_reduce.EmbedReduce.call"


class Slot:
    """An initializer for an optimizer's slot of a table, which its servers have made already.

    Args:
        value: The table's `TableVariable`.
        number: The slot's number.
    """

    def __init__(self, value: TableVariable, number: int) -> None:
        self._value, self._number = value, number

    def __call__(self, shape: Any, dtype: Any = None) -> tf.Tensor:
        return tf.zeros(shape, dtype)

    def variable(self, name: str) -> TableVariable:
        """The `TableVariable` of the slot."""
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
        # What it has drawn is not in its own configuration.
        config["config"]["seed"] = seed
    elif seed is not None:
        return None
    return config
