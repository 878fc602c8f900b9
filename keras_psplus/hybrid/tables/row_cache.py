"""Copies of a table's hottest rows on a worker, and gradients that wait there.

                 is read from                          its gradient
    a hot row    its copy, for `staleness` updates     waits, and is sent when the copy is too old
    others       the servers                           is sent at once

The worker applies its own gradients to its copies, times the number of replicas, as an estimate of
the sum: the servers' sum is the mean of these updates, as with local SGD. Gradients wait where the
update by their sum is the sum of their updates, which is so for plain SGD.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.hybrid.tables.prefetch import current_replica
from keras_psplus.hybrid.tables.table import Table
from keras_psplus.tables.local import outside
from keras_psplus.tables.row_optimizer import RowOptimizer
from keras_psplus.tf_internals import resource_variable_ops

# Choice of the rows of which a worker keeps copies, and their ages.
#
# Frequencies of ids, also of those without a copy, are counted in a sketch of a fixed size, whose
# counts are halved now and then (TinyLFU: Einziger et al., ACM Transactions on Storage 2017). An id
# gets the place of another one that is less frequent and has no gradient to send.


_NEVER = -(1 << 62)
# Cells of the sketch, and distinct ids of steps until all counts are halved, by copies.
_CELLS, _PERIOD = 8, 64
# Places among which the least frequent ones are found, by new ids; so that time is bounded.
_LOOKED_AT, _LEAST_LOOKED_AT = 4, 1024
_FACTORS = np.array([[0x9E3779B97F4A7C15], [0xC2B2AE3D27D4EB4F]], np.uint64)


class HotRows:
    """Places of the copies of rows, by ids; all methods take arrays.

    Time is the number of updates of the table that this replica has sent.

    Args:
        staleness: For how long a copy is read.

    Attributes:
        on_read: Method, for tests, that is given the time, the ids of a lookup, and for each
            whether it is read from the servers; or None.
    """

    on_read: Any = None

    def __init__(self, rows: int, staleness: int) -> None:
        self._staleness, self._room = staleness, rows
        # Sorted by ids.
        self._ids, self._places = np.zeros(0, np.int64), np.zeros(0, np.int32)
        self._id_of, self._holds = np.zeros(rows, np.int64), np.zeros(rows, bool)
        self._read_at, self._used_at = (np.full(rows, _NEVER, np.int64) for _ in range(2))
        bits = max((_CELLS * rows - 1).bit_length(), 8)
        self._counts, self._shift = np.zeros([2, 1 << bits], np.float32), np.uint64(64 - bits)
        # Ids in the sketch, and the place with which the search for one goes on.
        self._counted = self._turn = 0
        # Two lookups of a table may be at the same time.
        self._lock = threading.Lock()
        self.is_active = False

    def begin(self, ids: np.ndarray, now: np.ndarray) -> tuple[np.ndarray, ...]:
        """Places of the copies of distinct ids that a step reads.

        Args:
            ids: int64 vector.

        Returns:
            int32 places, -1 where there is none; whether the row is to be read from the servers;
            and the places that were another row's.
        """
        with self._lock:
            if not self.is_active:
                return np.full(len(ids), -1, np.int32), np.ones(len(ids), bool), _no_places()
            self._count(ids)
            places = self._find(ids)
            missing = np.flatnonzero(places < 0)
            is_read = now - self._read_at[places] > self._staleness
            is_read[missing] = True
            self._used_at[places[places >= 0]] = now
            places[missing] = self._admit(ids[missing], int(now))
            self._read_at[places[is_read & (places >= 0)]] = now
            if self.on_read is not None:
                self.on_read(int(now), ids, is_read)
            given = places[missing]
            return places, is_read, given[given >= 0]

    def put(self, ids: np.ndarray, now: np.ndarray, holds: np.ndarray) -> tuple[np.ndarray, ...]:
        """Places of the copies of distinct ids that an update changes.

        Args:
            ids: int64 vector.
            holds: Whether gradients of rows with a copy are kept.

        Returns:
            int32 places, -1 where there is none; and places and ids of the copies whose gradients
            are to be sent now, as the copies will be too old.
        """
        with self._lock:
            places = self._find(ids)
            if not self.is_active:
                # Nobody else applies this update to them.
                places[:] = -1
                self._read_at[:] = _NEVER
            if holds:
                self._holds[places[places >= 0]] = True
            return places, *self._take(self._holds & (now + 1 - self._read_at > self._staleness))

    def flush(self) -> tuple[np.ndarray, ...]:
        """Places and ids of all copies with gradients."""
        with self._lock:
            return self._take(self._holds.copy())

    def forget(self, gradients: bool) -> None:
        """Has all copies read again, and their gradients forgotten."""
        with self._lock:
            self._read_at[:] = _NEVER
            if gradients:
                self._holds[:] = False

    def _take(self, due: np.ndarray) -> tuple[np.ndarray, ...]:
        places = np.flatnonzero(due).astype(np.int32)
        self._holds[places] = False
        return places, self._id_of[places]

    def _find(self, ids: np.ndarray) -> np.ndarray:
        if not len(self._ids):
            return np.full(len(ids), -1, np.int32)
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return np.where(self._ids[at] == ids, self._places[at], -1).astype(np.int32)

    def _cells(self, ids: np.ndarray) -> np.ndarray:
        return (ids.astype(np.uint64) * _FACTORS) >> self._shift

    def _count(self, ids: np.ndarray) -> None:
        for counts, cells in zip(self._counts, self._cells(ids)):
            np.add.at(counts, cells, 1)
        self._counted += len(ids)
        if self._counted > _PERIOD * self._room:
            self._counts *= 0.5
            self._counted //= 2

    def _score(self, ids: np.ndarray) -> np.ndarray:
        first, second = self._cells(ids)
        return np.minimum(self._counts[0][first], self._counts[1][second])

    def _admit(self, ids: np.ndarray, now: int) -> np.ndarray:
        """Gives places to those of the ids that are frequent; returns the places, or -1."""
        given, score = np.full(len(ids), -1, np.int32), self._score(ids)
        # Of a row that was seen once, nobody knows that it will be again.
        hot = np.flatnonzero(score >= 2)
        hot = hot[np.argsort(-score[hot], kind="stable")]
        made = len(self._ids)
        free = np.arange(made, min(made + len(hot), self._room), dtype=np.int32)
        taken = _no_places()
        if len(free) < len(hot):
            others = self._next(made, max(_LOOKED_AT * len(hot), _LEAST_LOOKED_AT))
            others = others[~self._holds[others] & (self._used_at[others] < now)]
            of_others = self._score(self._id_of[others])
            count = min(len(hot) - len(free), len(others))
            if count < len(others):
                least = np.argpartition(of_others, count)[:count]
                others, of_others = others[least], of_others[least]
            order = np.argsort(of_others, kind="stable")
            candidates = score[hot[len(free) : len(free) + count]]
            taken = others[order][candidates > of_others[order]]
        places = np.concatenate([free, taken])
        hot = hot[: len(places)]
        given[hot] = places
        self._replace(taken, ids[hot], places, now)
        return given

    def _next(self, made: int, count: int) -> np.ndarray:
        """The next places in turn, at most once each."""
        places = (self._turn + np.arange(min(count, made))) % max(made, 1)
        self._turn += len(places)
        return places.astype(np.int32)

    def _replace(self, taken: np.ndarray, ids: np.ndarray, places: np.ndarray, now: int) -> None:
        if not len(places):
            return
        is_taken = np.zeros(self._room, bool)
        is_taken[taken] = True
        kept = ~is_taken[self._places]
        known, of_known = self._ids[kept], self._places[kept]
        order = np.argsort(ids)
        at = np.searchsorted(known, ids[order])
        self._ids = np.insert(known, at, ids[order])
        self._places = np.insert(of_known, at, places[order])
        self._id_of[places], self._used_at[places] = ids, now


def _no_places() -> np.ndarray:
    return np.zeros(0, np.int32)


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
            numbers: Learning rate and scalars of the optimizer.
            iterations: int64 scalar: updates of the optimizer before this one.

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
        # In `fit`.
        self.is_active = False

    def of(self, table: Table) -> RowCache | None:
        """The cache of a table for this replica; None if it has none."""
        if table.cache is None:
            return None
        key = table.key, current_replica()
        if key not in self._caches:
            self._caches[key] = RowCache(table)
            self._caches[key].hot.is_active = self.is_active
        return self._caches[key] if self._caches[key].can_be_used else None

    def may_hold(self, table: Table) -> bool:
        """Whether gradients of a table may be waiting now."""
        return any(cache.may_hold for (key, _), cache in self._caches.items() if key == table.key)

    def set_active(self, is_active: bool) -> bool:
        """Says whether steps read from copies; returns whether they did."""
        before, self.is_active = self.is_active, is_active
        for cache in self._caches.values():
            cache.hot.is_active = is_active
            cache.forget()
        return before

    def read_again(self) -> None:
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
