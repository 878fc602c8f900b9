"""Prefetch of the next batch's rows while a step computes.

    step t      | lookup | forward, backward     | push |
    prefetch    |        | rows of batch t+1     |      |
    step t+1                                            | lookup | ...

1. Step t has the batch after its own (`BatchAndNext`). It computes the ids that batch t+1 will look
   up, by repeating the operations that made the ids of batch t (`subgraph`).
2. It requests these rows and stores them with their ids in a buffer. Where workers are
   synchronous, the rows are as before the update of step t (`row_undo_log`).
3. Step t+1 uses the buffer if the ids are those that it looks up, and if this replica has not
   pushed to the table since step t. Otherwise it pulls its rows: a wrong prefetch costs time only.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable
from typing import Any, Self

import tensorflow as tf

from keras_psplus.all_reduce.data.elements import BatchAndNext
from keras_psplus.all_reduce.extended import MultiWorkerMirroredExtended
from keras_psplus.all_reduce.reduction.replica_states import ReplicaStates
from keras_psplus.core.jobs import failure
from keras_psplus.hybrid import rows as subgraph
from keras_psplus.hybrid.tables.table import Table
from keras_psplus.log import info_once
from keras_psplus.tf_internals import distribute_lib
from keras_psplus.tf_internals import framework_ops as ops

# Barrier between steps: all writes to a table precede the next step's reads.
#
# A variable of each replica connects its pushes, the step's last collective and its next lookups:
# TensorFlow keeps operations on one variable in their order, also over branches and loops.


class Barrier:
    """Barrier after each step's pushes, which adds a number to an existing collective.

    Args:
        extended: `MultiWorkerMirroredExtended`: the replicas, and variables of their steps.
    """

    _NAME = "tables"

    def __init__(self, extended: MultiWorkerMirroredExtended) -> None:
        self._extended = extended

    def _variable(self) -> tf.Variable:
        return self._extended.step_variable(self._NAME)

    def note_pushed(self, answers: list[tf.Tensor]) -> None:
        """Notes that servers have answered to what this replica has pushed."""
        with tf.control_dependencies(answers):
            self._variable().assign(0.0, read_value=False)

    def token(self) -> tf.Tensor:
        """Scalar to sum over replicas, available once this replica's pushes are done."""
        return self._variable().read_value()

    def release(self, total: tf.Tensor) -> None:
        """Notes that all replicas have arrived: `total` is the sum."""
        self._variable().assign(total * 0.0, read_value=False)

    def passed(self) -> tf.Tensor:
        """A tensor that is there once what was before the last `release` is done."""
        return self._variable().read_value()

    def wait(self) -> tf.Tensor:
        """Waits in the middle of a step for all replicas; returns a control tensor."""
        self.release(self._extended.sum_over_replicas([self.token()])[0])
        return self.passed()


# Rows of tables that were read ahead for the next batch's lookups.


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


_local = threading.local()


def current_lookahead() -> Lookahead | None:
    """Lookahead to the next batch in this replica's step, or None."""
    return getattr(_local, "lookahead", None)


def with_lookahead(rows_ahead: RowsAhead, fn: Callable[..., Any]) -> Callable[..., Any]:
    """A replica's function of a batch, as one of `BatchAndNext`."""

    @functools.wraps(fn)
    def of_pair(pair: BatchAndNext, *args: Any, **kwargs: Any) -> Any:
        with Lookahead(rows_ahead, pair):
            return fn(pair.batch, *args, **kwargs)

    return of_pair


class Lookahead:
    """Context of one replica's step that knows the batch after its own."""

    def __init__(self, rows_ahead: RowsAhead, pair: BatchAndNext) -> None:
        self._rows_ahead, self._is_there = rows_ahead, pair.is_there
        self._graph = ops.get_default_graph()
        own, following = (
            tf.nest.flatten(data, expand_composites=True) for data in (pair.data, pair.following)
        )
        self._following = {t.ref(): f for t, f in zip(own, following) if tf.is_tensor(t)}
        self._lookups: collections.Counter[Table] = collections.Counter()
        self._coming: dict[Table, list[tf.Tensor]] = collections.defaultdict(list)
        self._updated: set[Table] = set()

    def __enter__(self) -> Self:
        self._outer, _local.lookahead = current_lookahead(), self
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        _local.lookahead = self._outer
        if kind is None:
            for table in self._coming:
                self._rows_ahead.hold(table).assign(1, read_value=False)

    def on_padded_batch(self, batch: Any, padded: Any) -> None:
        """Notes what the step computes with in the place of its batch."""
        pairs = zip(*(tf.nest.flatten(data, expand_composites=True) for data in (batch, padded)))
        for own, other in pairs:
            if tf.is_tensor(own) and own.ref() in self._following:
                self._following[other.ref()] = self._following[own.ref()]

    def lookup(
        self,
        table: Table,
        indices: tf.Tensor,
        ids: tf.Tensor,
        ready: list[tf.Tensor],
        pull: Callable[[tf.Tensor], tf.Tensor],
        pull_ahead: Callable[[tf.Tensor], tf.Tensor],
    ) -> tf.Tensor | None:
        """Takes rows that have been read ahead, and reads ahead.

        Args:
            indices: What the step looks up.
            ids: The same as distinct row numbers in range.
            ready: List of tensors that are there when the table can be read.
            pull: Function of ids that brings rows.
            pull_ahead: The same for rows as they are before this step's update.

        Returns:
            The rows, or None if nothing is known of what the next batch looks up.
        """
        indices = self._of_next(table, indices)
        if indices is None:
            return None
        buffer = self._rows_ahead.buffer(table, self._lookups[table])
        self._lookups[table] += 1
        asked, rows = (variable.read_value() for variable in buffer)
        is_same = _equal(asked, ids)
        is_new = self._rows_ahead.hold(table).read_value() > 0
        rows = tf.cond(
            tf.logical_and(is_same, is_new), lambda: tf.identity(rows), lambda: pull(ids)
        )
        coming = distinct(table, indices)[0]
        # An id that is out of range is named by the step that looks it up.
        is_good = tf.logical_not(tf.reduce_any(wrong(table, coming)))
        is_asked = tf.logical_and(self._is_there, is_good)
        with tf.control_dependencies(ready):
            coming = coming[: tf.where(is_asked, tf.size(coming), 0)]
        brought = pull_ahead(coming)
        for variable, value in zip(buffer, (coming, brought)):
            variable.assign(value, read_value=False)
        self._coming[table].append(brought)
        return rows

    def before_update(self, table: Table) -> list[tf.Tensor]:
        """Tensors that have to be there before a table's gradients are sent.

        Servers know the rows as they were before the last update, but not before two of them.
        """
        is_first = table not in self._updated
        self._updated.add(table)
        return [] if is_first else self._coming[table]

    def _of_next(self, table: Table, indices: tf.Tensor) -> tf.Tensor | None:
        """Next batch's equivalent of `indices`, or None."""
        try:
            if tf.executing_eagerly() or indices.graph is not self._graph:
                raise subgraph.NotRepeatable("it is looked up in another function")
            if ops.get_default_graph() is not self._graph:
                raise subgraph.NotRepeatable("it is looked up in a branch")
            if self._updated:
                raise subgraph.NotRepeatable("it is looked up after an update")
            return subgraph.repeat(indices, self._following)
        except subgraph.NotRepeatable as reason:
            info_once(
                "rows of '%s' are not read ahead in one of its lookups: %s", table.name, reason
            )
            return None


def distinct(table: Table, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Distinct row numbers of a lookup, and the index of each id among them."""
    ids = tf.reshape(tf.cast(indices, _LONG), [-1])
    return tf.unique(tf.where(ids < 0, ids + table.rows, ids))


def wrong(table: Table, ids: tf.Tensor) -> tf.Tensor:
    """For each id, whether it is none of the table."""
    return tf.logical_or(ids < 0, ids >= table.rows)


def check_range(table: Table, unique: tf.Tensor) -> tf.Operation:
    """An assertion that ids are rows of the table."""
    outside = wrong(table, unique)
    good = tf.logical_not(tf.reduce_any(outside))

    def text() -> tf.Tensor:
        first = tf.boolean_mask(unique, outside)[0]
        return tf.strings.join(
            [
                f"{failure.REFUSED}The layer {table.layer_name} was asked for a row that its "
                f"table does not have: ids go from 0 to {table.rows - 1}. Received: id ",
                # Negative ones count from the end, and have been moved there.
                tf.strings.as_string(tf.where(first < 0, first - table.rows, first)),
            ]
        )

    return tf.debugging.Assert(good, [tf.cond(good, lambda: tf.constant(""), text)])


def _equal(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    least = tf.minimum(tf.size(one), tf.size(other))
    as_many = tf.equal(tf.size(one), tf.size(other))
    return tf.logical_and(as_many, tf.reduce_all(tf.equal(one[:least], other[:least])))
