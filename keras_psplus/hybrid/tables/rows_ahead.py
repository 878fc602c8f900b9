"""Rows of tables that were read ahead for the next batch's lookups."""

import tensorflow as tf

from keras_psplus.all_reduce.reduction.replica_states import ReplicaStates
from keras_psplus.hybrid.tables.table import Table
from keras_psplus.tf_internals import distribute_lib

_LONG = tf.int64


class RowsAhead:
    """Rows that this process's replicas have read ahead, by lookup.

    Attributes:
        states: `ReplicaStates` of all of them, which a backup keeps.
    """

    def __init__(self) -> None:
        self.states = ReplicaStates("/CPU:0")
        self._buffers: dict[tuple[int, int, int], tuple[tf.Variable, tf.Variable]] = {}
        self._hold: dict[tuple[int, int], tf.Variable] = {}

    def buffer(self, table: Table, number: int) -> tuple[tf.Variable, tf.Variable]:
        """Ids and rows that this replica has read ahead for a numbered lookup."""
        key = table.key, number, current_replica()
        if key not in self._buffers:
            name = "/".join(map(str, key))
            self._buffers[key] = (
                self.states.variable(f"{name}/ids", [None], _LONG),
                self.states.variable(f"{name}/rows", [None, table.dim], tf.float32),
            )
        return self._buffers[key]

    def hold(self, table: Table) -> tf.Variable:
        """An int64, 1 until this replica pushes to a table after reading ahead."""
        key = table.key, current_replica()
        if key not in self._hold:
            name = "/".join(map(str, key))
            self._hold[key] = self.states.variable(f"{name}/is_ahead", [], _LONG)
        return self._hold[key]

    def forget(self) -> None:
        """Has rows that were read ahead be read again."""
        for variable in self._hold.values():
            variable.assign(0)


def current_replica() -> int:
    """Number of the replica whose context this is; 0 outside of a step."""
    context = distribute_lib.get_replica_context()
    return 0 if context is None else context._replica_id
