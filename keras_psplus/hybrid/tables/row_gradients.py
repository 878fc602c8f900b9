"""Gradients of tables in an optimizer's update: their servers sum, clip and apply them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import tensorflow as tf

from keras_psplus.hybrid.tables.embeddings import table_of
from keras_psplus.hybrid.tables.table import Table

if TYPE_CHECKING:
    from keras_psplus.hybrid.extended import HybridExtended


class Scaled(NamedTuple):
    """Gradient of a table that has been sent, and its scale factor."""

    scale: Any


def split(variables: Sequence[keras.Variable]) -> tuple[list[int], list[int]]:
    """The numbers of those variables that are tables, and of the others."""
    tables = [i for i, variable in enumerate(variables) if table_of(variable) is not None]
    return tables, [i for i in range(len(variables)) if i not in tables]


def on_dense(
    function: Callable[..., Sequence[tf.Tensor | tf.IndexedSlices]],
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[tf.Tensor | tf.IndexedSlices],
    variables: Sequence[keras.Variable],
    dense: Sequence[int],
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Replaces the dense entries of `grads` by `function`'s result."""
    made = function(optimizer, [grads[i] for i in dense], [variables[i] for i in dense])
    grads = list(grads)
    for i, gradient in zip(dense, made):
        grads[i] = gradient
    return grads


def clips_by_norm(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer clips by norms, which need sums before the update."""
    return bool(optimizer.clipnorm or optimizer.global_clipnorm)


def check_sums(extended: HybridExtended, optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ValueError if servers do not sum the gradients of all workers."""
    if extended.barrier is None:
        name = "clipnorm" if optimizer.clipnorm else "global_clipnorm"
        raise ValueError(
            f"`{name}` needs the sum of all workers' gradients, which `sync=False` does not "
            f"make: use `clipvalue`, or `sync=True`. Received: {name}={getattr(optimizer, name)}"
        )


def check_rows(table: Table, gradient: Any) -> None:
    """Raises ValueError if a table's gradient is not one of rows."""
    if not isinstance(gradient, (Scaled, tf.IndexedSlices)):
        raise ValueError(
            f"The gradient of the table '{table.name}' must be one of rows. Received: {gradient}"
        )


def squares(extended: HybridExtended, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """Squared norms of the sums of all workers' gradients of tables, from their servers."""
    return extended.square_of([table_of(variable) for variable in variables])  # type: ignore[misc]


def apply_on_servers(
    extended: HybridExtended,
    optimizer: keras.optimizers.Optimizer,
    gradient: tf.IndexedSlices | Scaled,
    variable: keras.Variable,
    learning_rate: tf.Tensor | float,
) -> None:
    """Has the servers of a table apply a gradient.

    Raises:
        ValueError: If it is not one of rows, or another optimizer's.
    """
    table = table_of(variable)
    assert table is not None
    check_rows(table, gradient)
    if table.optimizer is not optimizer:
        raise ValueError(
            f"The table '{table.name}' on parameter servers is updated by another optimizer. "
            f"Received: {optimizer.name} beside {table.optimizer and table.optimizer.name}"
        )
    if isinstance(gradient, Scaled):
        extended.commit(table, optimizer, learning_rate, gradient.scale)
    else:
        extended.push_rows(table, gradient, optimizer, learning_rate)


def square(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """The squared norm of a gradient, a float32 scalar."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.reduce_sum(tf.square(tf.cast(values, tf.float32)))


def scale_of(squares: Sequence[tf.Tensor], limit: float) -> tf.Tensor:
    """Scale that brings gradients of these squared norms to a norm of at most `limit`."""
    norm = tf.sqrt(tf.add_n(squares))
    # A norm that is not finite makes all gradients so, as in Keras.
    return limit / tf.maximum(norm, limit) + (norm - norm)
