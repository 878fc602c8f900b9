"""Tables as variables of Keras and of the tape, which are read by rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import tensorflow as tf

from keras_psplus.hybrid.tables.registry import Tables
from keras_psplus.hybrid.tables.table import Table
from keras_psplus.tables.row_variable import with_gradient
from keras_psplus.tf_internals import resource_variable_ops
from keras_psplus.tf_internals.composite_variable import CompositeVariable


class TableVariable(CompositeVariable):
    """Variable for a table on parameter servers, or for a slot of its optimizer.

    Args:
        table: `table.Table`.
        name: The variable's name.
        trainable: Whether it is trained.
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
            # What the tape knows the table by.
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
        """A variable for another slot of the same table."""
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
