"""`HybridStrategy`'s implementation half: lookups and updates of tables, beside all-reduce."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus.all_reduce.extended import MultiWorkerMirroredExtended
from keras_psplus.all_reduce.step.replica_step import MirroredReplicaStep
from keras_psplus.core.batch import duplicate_rows
from keras_psplus.core.batch.replica_step import TensorTraffic, TrafficVariables
from keras_psplus.core.graph.variables import made_outside
from keras_psplus.hybrid.tables import prefetch
from keras_psplus.hybrid.tables import table as table_module
from keras_psplus.hybrid.tables.dynamic import DynamicVariable
from keras_psplus.hybrid.tables.embeddings import TableVariable
from keras_psplus.hybrid.tables.prefetch import Barrier, RowsAhead, current_replica
from keras_psplus.hybrid.tables.row_cache import RowCache, RowCaches
from keras_psplus.hybrid.tables.table import Table
from keras_psplus.tables.row_optimizer import scalars_of
from keras_psplus.tf_internals import distribute_lib

if TYPE_CHECKING:
    _Replicas = MultiWorkerMirroredExtended
else:
    _Replicas = object

_LONG = tf.int64


class TableExtended(_Replicas):
    """Mixin for an implementation half: lookups and updates of tables."""

    # The host asks servers for the rows of a batch's ids.
    fetches_to_devices = False

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        *args: Any,
        is_sync: bool,
        reads_ahead: bool,
        **options: Any,
    ) -> None:
        self._barrier = Barrier(self) if is_sync else None
        self._clocks: dict[tuple[int, int], tf.Variable] = {}
        self.table_traffic = TrafficVariables()
        self.rows_ahead, self._reads_ahead = RowsAhead(), reads_ahead
        self.row_caches = RowCaches()
        # Functions by tables; and the numbers of pushes up to which nothing waits.
        self._flushes: dict[Any, Callable[[], Any]] = {}
        self._flushed: dict[Table, int] = {}
        super().__init__(strategy, *args, **options)
        if reads_ahead:
            self.worker_state.add("rows_read_ahead", self.rows_ahead, self.rows_ahead.states)

    @property
    def barrier(self) -> Barrier | None:
        return self._barrier

    def has_made(self, variable: Any) -> bool:
        return isinstance(variable, TableVariable) or super().has_made(variable)

    def broadcast(self, variables: Iterable[tf.Variable]) -> None:
        # Of a table there is one value only.
        tables = [v for v in variables if isinstance(v, TableVariable)]
        super().broadcast([v for v in variables if not isinstance(v, TableVariable)])
        for variable in tables:
            variable.note_followed()

    def _clock(self, table: Table) -> tf.Variable:
        """An int64 of a local replica that counts its pushes to a table."""
        key = table.key, current_replica()
        if key not in self._clocks:
            self._clocks[key] = made_outside(lambda: tf.constant(0, _LONG))
        return self._clocks[key]

    def _pushes(self, table: Table) -> int:
        clocks = list(self._clocks.items())
        return sum(int(clock.numpy()) for (key, _), clock in clocks if key == table.key)

    def _count(self, entry: TensorTraffic) -> None:
        self.table_traffic.add([entry], current_replica())

    def lookup(self, variable: TableVariable, indices: tf.Tensor) -> tf.Tensor:
        """Rows of a table; negative indices count from the end."""
        table = variable.table
        indices = tf.convert_to_tensor(indices)
        most = indices.shape.num_elements()
        unique, positions = prefetch.distinct(table, indices)
        ready = self._ready()
        with tf.control_dependencies([*ready, prefetch.check_range(table, unique)]):
            unique = tf.identity(unique)
        pull = functools.partial(self._pull, table, most)
        # Of a row that does not count, nothing is read.
        step, wanted = MirroredReplicaStep.current(), unique
        if step is not None:
            wanted = step.rows_if_any(unique)
        ahead, rows = prefetch.current_lookahead(), None
        if ahead is not None:
            pull_ahead = functools.partial(self._pull_ahead, table, most)
            rows = ahead.lookup(table, indices, wanted, ready, pull, pull_ahead)
        if rows is None:
            rows = self._read(table, wanted, pull)
        if step is not None and step.may_be_empty:
            rows = tf.cond(
                step.has_rows(),
                lambda: tf.identity(rows),
                lambda: tf.zeros([tf.size(unique), table.dim]),
            )
        rows = variable.with_gradient(rows, unique, positions)
        rows = tf.reshape(rows, tf.concat([tf.shape(indices), [table.dim]], 0))
        return tf.ensure_shape(rows, [*indices.shape, table.dim])

    def lookup_keys(self, variable: DynamicVariable, keys: tf.Tensor, trains: bool) -> tf.Tensor:
        """Rows of a dynamic table, one for each of a vector of keys."""
        table, step = variable.table, MirroredReplicaStep.current()
        unique, positions = tf.unique(keys)
        with tf.control_dependencies(self._ready()):
            unique = tf.identity(unique)
        # Of a row that does not count, nothing is read, nothing is made.
        wanted = unique if step is None else step.rows_if_any(unique)
        method = "lookup_training" if trains else "lookup"
        most = keys.shape.num_elements()
        pull = functools.partial(self._pull, table, most, method=method)
        rows = self._read(table, wanted, pull) if trains else pull(wanted)
        if step is not None and step.may_be_empty:
            nothing = tf.zeros([tf.size(unique), table.dim])
            rows = tf.cond(step.has_rows(), lambda: tf.identity(rows), lambda: nothing)
        # In the gradient of a branch, TensorFlow cannot read variables that the branch has not.
        count = tf.size(wanted)
        kept = (lambda rows: rows) if wanted is unique else (lambda rows: rows[:count])
        return variable.with_key_gradient(rows, unique, positions, kept)

    def _ready(self) -> list[tf.Tensor]:
        """Tensors that show that servers have applied the last step of all workers."""
        if self._barrier is None or distribute_lib.get_replica_context() is None:
            return []
        step = MirroredReplicaStep.current()
        if step is None or not step.has_pushed:
            return [self._barrier.passed()]
        # A step of the user's own that looks up what it has updated.
        step.has_pushed = False
        return [self._barrier.wait()]

    def _cache(self, table: Table) -> RowCache | None:
        step = MirroredReplicaStep.current()
        return None if step is None or step.engine.evaluates else self.row_caches.of(table)

    def _read(
        self, table: Table, ids: tf.Tensor, pull: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        """Rows of distinct ids, some of them from the table's cache."""
        cache = self._cache(table)
        if cache is None:
            return pull(ids)
        return cache.lookup(ids, self._clock(table).read_value(), pull)

    def _pull(self, table: Table, most: int, ids: tf.Tensor, **options: Any) -> tf.Tensor:
        self._count(table.pull_codec.traffic(table.name, "pull", ids))
        return table_module.pull(table, ids, current_replica(), most, **options)

    def _pull_ahead(self, table: Table, most: int, ids: tf.Tensor) -> tf.Tensor:
        step = None if self._barrier is None else self._clock(table).read_value()
        return self._pull(table, most, ids, purpose="ahead", step=step)

    def push_rows(
        self,
        table: Table,
        slices: tf.IndexedSlices,
        optimizer: keras.optimizers.Optimizer,
        learning_rate: tf.Tensor | float,
        waits: bool = False,
    ) -> None:
        """Sends a replica's gradient of a table, for which servers may wait for `commit`."""
        ids = tf.cast(slices.indices, _LONG)
        rows = tf.ensure_shape(tf.cast(slices.values, tf.float32), [None, table.dim])
        with tf.control_dependencies([] if waits else _before_update(table)):
            of = duplicate_rows.looked_up(ids)
            if of is not None:
                ids, most = tf.identity(ids), of.shape.num_elements()
            else:
                most = rows.shape[0]
                distinct = duplicate_rows.summed(tf.IndexedSlices(rows, ids))
                ids, rows = distinct.indices, distinct.values
        now, iterations = self._clock(table).read_value(), _iterations(optimizer)
        numbers = _numbers(optimizer, learning_rate)
        cache = None if waits else self._cache(table)
        if cache is not None:
            replicas = self._num_replicas_in_sync
            ids, rows = cache.take(ids, rows, now, numbers, iterations, replicas)
            most = None if most is None else most + cache.most_waiting
        self._send(table, (ids, rows), (now, iterations), numbers, most, waits)

    def _send(
        self,
        table: Table,
        slices: tuple[tf.Tensor, tf.Tensor],
        times: tuple[tf.Tensor, tf.Tensor],
        numbers: tf.Tensor,
        most: int | None,
        waits: bool,
    ) -> None:
        self._count(table.push_codec.traffic(table.name, "gradient", slices[0]))
        rank = tf.constant(self.rank_in_context(), _LONG)
        send = table_module.push_to_wait if waits else table_module.push
        answers = send(table, slices, current_replica(), (rank, *times), numbers, most)
        if not waits:
            self._count_push(table, self._clock(table))
        self._note(answers)

    def flush_caches(self, tables: Sequence[Table]) -> None:
        """Has servers apply gradients that wait on workers; on all of them, between steps."""
        self.row_caches.read_again()
        pushes = {t: self._pushes(t) for t in tables if self.row_caches.may_hold(t)}
        waiting = [table for table in pushes if pushes[table] != self._flushed.get(table)]
        if not waiting:
            return
        key = tuple((table.key, table.optimizers) for table in waiting)
        if key not in self._flushes:

            def flush() -> None:
                step = MirroredReplicaStep.current()
                assert step is not None
                step.recording = False
                for table in waiting:
                    cache, optimizer = self.row_caches.of(table), table.optimizer
                    assert cache is not None and optimizer is not None
                    numbers = _numbers(optimizer, optimizer.learning_rate)
                    times = self._clock(table).read_value(), _iterations(optimizer)
                    self._send(table, cache.flush(), times, numbers, None, waits=False)

            run = self._container_strategy().run
            self._flushes[key] = tf.function(lambda: run(flush), autograph=False)
        self._flushes[key]()
        self._flushed |= {table: self._pushes(table) for table in waiting}

    def square_of(self, tables: Sequence[Table]) -> list[tf.Tensor]:
        """Waits for all replicas' gradients, and returns their sum's squared norm by table."""
        assert self._barrier is not None
        with tf.control_dependencies([self._barrier.wait()]):
            return [tf.add_n(table_module.norms(table, current_replica())) for table in tables]

    def commit(
        self,
        table: Table,
        optimizer: keras.optimizers.Optimizer,
        learning_rate: tf.Tensor | float,
        scale: tf.Tensor,
    ) -> None:
        """Has the servers apply what they were sent, times `scale`."""
        clock = self._clock(table)
        with tf.control_dependencies(_before_update(table)):
            header = clock.read_value(), _iterations(optimizer)
        numbers = tf.concat([[tf.cast(scale, tf.float32)], _numbers(optimizer, learning_rate)], 0)
        self._note(table_module.commit(table, current_replica(), header, numbers))
        self._count_push(table, clock)

    def _count_push(self, table: Table, clock: tf.Variable) -> None:
        clock.assign_add(1, read_value=False)
        if self._reads_ahead:
            self.rows_ahead.hold(table).assign(0, read_value=False)

    def _note(self, answers: list[tf.Tensor]) -> None:
        if self._barrier is not None:
            self._barrier.note_pushed(answers)
            step = MirroredReplicaStep.current()
            if step is not None:
                step.has_pushed = True


class HybridExtended(TableExtended, MultiWorkerMirroredExtended):
    """Additional APIs of `keras_psplus.HybridStrategy`."""


def _before_update(table: Table) -> list[tf.Operation]:
    ahead = prefetch.current_lookahead()
    return [] if ahead is None else ahead.before_update(table)


def _iterations(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    return tf.cast(tf.convert_to_tensor(optimizer._iterations), _LONG)


def _numbers(optimizer: keras.optimizers.Optimizer, learning_rate: Any) -> tf.Tensor:
    scalars = [tf.cast(tf.convert_to_tensor(v), tf.float32) for v in scalars_of(optimizer)]
    return tf.stack([tf.cast(tf.convert_to_tensor(learning_rate), tf.float32), *scalars])
