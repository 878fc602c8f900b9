"""Copies of a table's hottest rows on a worker, and gradients that wait there.

                 is read from                          its gradient
    a hot row    its copy, for `staleness` updates     waits, and is sent when the copy is too old
    others       the servers                           is sent at once

The worker applies its own gradients to its copies, times the number of replicas, as an estimate of
the sum: the servers' sum is the mean of these updates, as with local SGD. Gradients wait where the
update by their sum is the sum of their updates, which is so for plain SGD.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_psplus.hybrid.tables.hot_rows import HotRows
from keras_psplus.hybrid.tables.rows_ahead import current_replica
from keras_psplus.hybrid.tables.table import Table
from keras_psplus.tables.local import outside
from keras_psplus.tables.rows.row_optimizer import RowOptimizer
from keras_psplus.tf_internals import resource_variable_ops

_INT, _LONG = tf.int32, tf.int64


class RowCache:
    """Copies of rows of one table for one local replica.

    Args:
        table: `Table` with a `cache`.
    """

    def __init__(self, table: Table) -> None:
        assert table.cache is not None
        self._table, self._rows = table, table.cache["rows"]
        self.hot = HotRows(self._rows, table.cache["staleness"])
        self._copies = self._variable()
        # Sums of gradients that wait; only where some do.
        self._sums: Any = None
        self._optimizer: RowOptimizer | None = None
        self._first_slots: list[Any] = []
        self._number = 0

    def _variable(self) -> Any:
        with tf.init_scope(), tf.device("/CPU:0"):
            zeros = tf.zeros([self._rows, self._table.dim])
            return resource_variable_ops.ResourceVariable(zeros, trainable=False)

    @property
    def can_be_used(self) -> bool:
        """Whether the table's optimizer is known."""
        return self._table.row_config is not None

    @property
    def holds(self) -> bool:
        """Whether gradients wait."""
        config = self._table.row_config
        return config is not None and is_linear(config)

    @property
    def most_waiting(self) -> int:
        """Number of rows that `take` may add to those of a step."""
        return self._rows if self.holds else 0

    @property
    def may_hold(self) -> bool:
        """Whether gradients may be waiting now."""
        return self._sums is not None

    @property
    def _updater(self) -> RowOptimizer:
        """The table's optimizer, on the copies."""
        if self._optimizer is None or self._number != self._table.optimizers:
            first: list[Any] = []

            def make_slot(initializer: Any, shape: Any) -> tf.Variable:
                first.append(initializer)
                return tf.Variable(initializer(shape, dtype="float32"), trainable=False)

            config = self._table.row_config
            assert config is not None
            with tf.init_scope():
                self._optimizer = outside(lambda: RowOptimizer(config, self._copies, make_slot))
            self._first_slots, self._number = first, self._table.optimizers
        assert self._optimizer is not None
        return self._optimizer

    def lookup(
        self, ids: tf.Tensor, now: tf.Tensor, pull: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        """Rows of a step.

        Args:
            ids: int64 vector of distinct ids.
            now: int64 scalar, the number of updates that this replica has sent.
            pull: Function of ids that brings rows from the servers.
        """
        places, is_read, given = tf.numpy_function(
            self.hot.begin, [ids, self._later(now)], [_INT, tf.bool, _INT], stateful=True
        )
        places, is_read, given = (tf.ensure_shape(of, [None]) for of in (places, is_read, given))
        done = [
            tf.raw_ops.ResourceScatterUpdate(
                resource=slot.handle,
                indices=given,
                updates=first([tf.size(given), self._table.dim], dtype="float32"),
            )
            for slot, first in zip(self._updater.slots, self._first_slots)
        ]
        where = tf.cast(tf.where(is_read)[:, 0], _INT)
        rows = pull(tf.gather(ids, where))
        at = tf.gather(places, where)
        kept = at >= 0
        done.append(_scatter(self._copies, tf.boolean_mask(at, kept), tf.boolean_mask(rows, kept)))
        with tf.control_dependencies(done):
            known = self._copies.sparse_read(tf.maximum(places, 0))
        return tf.tensor_scatter_nd_update(known, where[:, tf.newaxis], rows)

    def take(
        self,
        ids: tf.Tensor,
        rows: tf.Tensor,
        now: tf.Tensor,
        numbers: tf.Tensor,
        iterations: tf.Tensor,
        replicas: int,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Applies a step's gradient to the copies.

        Args:
            ids: int64 vector of distinct ids.
            rows: Their gradients, as they will reach the servers.
            now: As for `lookup`.
            numbers: Learning rate and scalars of the optimizer.
            iterations: int64 scalar: updates of the optimizer before this one.
            replicas: Number of all replicas.

        Returns:
            Ids and gradients that are to be sent now.
        """
        args = [ids, self._later(now), tf.constant(self.holds)]
        answers = tf.numpy_function(self.hot.put, args, [_INT, _INT, _LONG], stateful=True)
        places, due, due_ids = (tf.ensure_shape(answer, [None]) for answer in answers)
        has_copy = places >= 0
        own, gradient = tf.boolean_mask(places, has_copy), tf.boolean_mask(rows, has_copy)
        own, gradient = tf.ensure_shape(own, [None]), tf.ensure_shape(gradient, rows.shape)
        # Others' gradients of these rows come late: until then, one's own stands for each of them.
        regularized = self._updater.regularized(own, gradient * replicas)
        self._updater.apply(own, regularized, numbers[0], numbers[1:], iterations)
        if not self.holds:
            return ids, rows
        if self._sums is None:
            self._sums = self._variable()
        added = tf.raw_ops.ResourceScatterAdd(
            resource=self._sums.handle, indices=own, updates=gradient
        )
        with tf.control_dependencies([added]):
            sums = self._taken(due)
        others = tf.logical_not(has_copy)
        return (
            tf.concat([tf.boolean_mask(ids, others), due_ids], 0),
            tf.concat([tf.boolean_mask(rows, others), sums], 0),
        )

    def flush(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Ids and sums of all gradients that wait, which wait no more."""
        due, due_ids = tf.numpy_function(self.hot.flush, [], [_INT, _LONG], stateful=True)
        return tf.ensure_shape(due_ids, [None]), self._taken(tf.ensure_shape(due, [None]))

    def forget(self, gradients: bool = False) -> None:
        """Has copies read again, and perhaps forgets gradients that wait."""
        self.hot.forget(gradients)
        if gradients and self._sums is not None:
            self._sums.assign(tf.zeros_like(self._sums))

    def _taken(self, places: tf.Tensor) -> tf.Tensor:
        sums = self._sums.sparse_read(places)
        with tf.control_dependencies([sums]):
            done = _scatter(self._sums, places, tf.zeros_like(sums))
        with tf.control_dependencies([done]):
            return tf.identity(sums)

    def _later(self, value: tf.Tensor) -> tf.Tensor:
        """The value, once the copies have been written by all that was traced before."""
        with tf.control_dependencies([self._copies.sparse_read([0])]):
            return tf.identity(value)


class RowCaches:
    """The caches of a process, by table and local replica."""

    def __init__(self) -> None:
        self._caches: dict[tuple[int, int], RowCache] = {}
        self._is_active = False

    def of(self, table: Table) -> RowCache | None:
        """The cache of a table for this replica; None if it has none."""
        if table.cache is None:
            return None
        key = table.key, current_replica()
        if key not in self._caches:
            self._caches[key] = RowCache(table)
            self._caches[key].hot.is_active = self._is_active
        return self._caches[key] if self._caches[key].can_be_used else None

    def may_hold(self, table: Table) -> bool:
        """Whether gradients of a table may be waiting now."""
        return any(cache.may_hold for (key, _), cache in self._caches.items() if key == table.key)

    def set_active(self, is_active: bool) -> bool:
        """Says whether steps read from copies; returns whether they did."""
        before, self._is_active = self._is_active, is_active
        for cache in self._caches.values():
            cache.hot.is_active = is_active
            cache.forget()
        return before

    def read_again(self) -> None:
        """Has all copies be read again."""
        for cache in self._caches.values():
            cache.forget()

    def forget(self, table: Table | None = None) -> None:
        """Forgets copies and gradients of a table, or of all, that was set."""
        for (key, _), cache in self._caches.items():
            if table is None or table.key == key:
                cache.forget(gradients=True)


def is_linear(config: dict[str, Any]) -> bool:
    """Whether the update by a sum of gradients is the sum of their updates."""
    optimizer = config["optimizer"]
    others = ("weight_decay", "clipvalue", "constraint", "regularizer")
    # Keras writes it in small letters when it makes an optimizer of it.
    is_sgd = optimizer["class_name"].lower() == "sgd" and optimizer["module"] == "keras.optimizers"
    is_plain = is_sgd and not optimizer["config"]["momentum"]
    return is_plain and not any(config[other] for other in others)


def _scatter(variable: Any, places: tf.Tensor, rows: tf.Tensor) -> tf.Operation:
    return tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=places, updates=rows)
