"""Engines of `HybridStrategy`: that of all-reduce, or one with shares, and tables."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import tensorflow as tf

from keras_psplus.all_reduce.engine import AllReduceEngine
from keras_psplus.all_reduce.step.replica_step import MirroredReplicaStep
from keras_psplus.core.backup.backup_tables import BackupTables
from keras_psplus.core.base.optimizers import is_wrapper
from keras_psplus.engine import Call, answers
from keras_psplus.hybrid.extended import TableExtended
from keras_psplus.hybrid.server_tables import ServerTables
from keras_psplus.hybrid.servers import Servers
from keras_psplus.hybrid.tables import dynamic, embeddings, prefetch
from keras_psplus.hybrid.tables.embeddings import is_table, table_of
from keras_psplus.hybrid.tables.placement import TablePlacer, Tables
from keras_psplus.hybrid.tables.table import Table
from keras_psplus.keras_internals.keras_parts import base_optimizer
from keras_psplus.log import info_once, logger
from keras_psplus.sharding import sums
from keras_psplus.sharding.engine import ShardedEngine
from keras_psplus.sharding.extended import ShardedExtended
from keras_psplus.sharding.full_engine import FullyShardedEngine
from keras_psplus.sharding.plan import OptimizerPlan
from keras_psplus.tables.row_optimizer import weight_decay_of

if TYPE_CHECKING:
    from keras.optimizers import Optimizer

    from keras_psplus.engine import Gradients, Pairs, Variables

    _Replicas = AllReduceEngine
else:
    _Replicas = object


@dataclasses.dataclass(eq=False)
class TableContext:
    """The objects of a `HybridStrategy` that its tables are made with."""

    servers: Servers
    tables: Tables
    placer: TablePlacer
    backup_tables: ServerTables


class _Scaled(NamedTuple):
    """Gradient of a table that has been sent, and its scale factor."""

    scale: Any


class TableEngine(_Replicas):
    """Mixin for an engine of replicas that take steps together: parameter servers have tables."""

    # Lookups of tables are not compiled, which is most of the step of many models.
    compiles_by_default, exports_copies = False, True

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy)
        # Until `fit` makes the iterator over its data; those of validation come later.
        self._awaits_data = False

    @property
    def _context(self) -> TableContext | None:
        """Context that tables are made with; None without parameter servers."""
        return self.strategy._context

    # The trainer and its data.

    def is_remote(self, layer: keras.Layer) -> bool:
        weights = (*layer._trainable_variables, *layer._non_trainable_variables)
        return any(embeddings.is_table(one) for one in weights)

    @answers("fit", "train_on_batch")
    def _train(self, call: Call) -> Any:
        if call.name != "fit":
            return super()._train(call)
        caches = self.strategy.extended.row_caches
        were_active = caches.set_active(True)
        try:
            return self._fit(call)
        finally:
            caches.set_active(were_active)

    def _fit(self, call: Call) -> Any:
        if not self.strategy.prefetch:
            return super()._train(call)
        # Rows were read ahead for a batch that never came.
        self.strategy.extended.rows_ahead.forget()
        runs_eagerly = call.owner.run_eagerly
        if runs_eagerly:
            info_once("no rows are read ahead: the model runs eagerly")
        outer, self._awaits_data = self._awaits_data, not runs_eagerly
        try:
            return super()._train(call)
        finally:
            self._awaits_data = outer

    @property
    def reads_ahead(self) -> bool:
        awaited, self._awaits_data = self._awaits_data, False
        return awaited

    def on_padded_batch(self, batch: Any, padded: Any) -> None:
        ahead = prefetch.current_lookahead()
        if ahead is not None:
            ahead.on_padded_batch(batch, padded)

    def build(self, call: Call) -> None:
        super().build(call)
        if self._context is not None and self.strategy.is_chief and self._context.placer.has_news:
            logger.info("HybridStrategy keeps\n%s", self._context.placer.report())

    # Variables.

    @answers("make_variable")
    def _make_variable(self, call: Call) -> Any:
        variable, shape = call.owner, call.get("shape")
        variable._decision = None
        if self._context is not None and shape is not None:
            variable._decision = embeddings.decide(
                self._context.placer, shape, call.get("name"), call.get("dtype")
            )
        return super()._make_variable(call)

    @answers("make_table")
    def _make_dynamic_table(self, call: Call) -> Any:
        if self._context is None:
            return super()._make_dynamic_table(call)
        lookup, spec = self.strategy.extended.lookup_keys, call.get("spec")
        cache = spec.get("cache") or self._context.placer.cache_of(spec["name"])
        if cache is not None:
            spec = {**spec, "cache": cache}
        return dynamic.make(self._context.tables, lookup, spec, call.owner.trainable)

    @answers("initialize_with_initializer")
    def _initialize_with_initializer(self, call: Call) -> None:
        variable, initializer = call.owner, call.get("initializer")
        if isinstance(initializer, embeddings.Slot):
            variable._value = initializer.variable(variable.name)
            return None
        decision = getattr(variable, "_decision", None)
        if decision is None or not decision.on_servers:
            return super()._initialize_with_initializer(call)
        assert self._context is not None
        lookup, cache = self.strategy.extended.lookup, self._context.placer.cache_of(decision.path)
        return embeddings.make(self._context.tables, lookup, variable, decision, initializer, cache)

    @answers("add_weight")
    def _add_weight(self, call: Call) -> keras.Variable:
        variable = call.proceed()
        decision = getattr(variable, "_decision", None)
        if decision is not None and decision.on_servers:
            embeddings.take_over(variable)
        return variable

    def reads_rows(self, variable: keras.Variable) -> bool:
        if embeddings.is_table(variable):
            return not embeddings.has_other_value(variable)
        return super().reads_rows(variable)

    @answers("take")
    def _take(self, call: Call) -> Any:
        indices = call.get("indices")
        is_sparse = isinstance(indices, tf.SparseTensor) and call.get("axis") == 0
        if is_sparse and embeddings.is_table(call.owner):
            # As Keras has it: what is missing is row 0.
            call = call.changed(indices=tf.sparse.to_dense(indices))
        return super()._take(call)

    def _rows(self, variable: Any, indices: tf.Tensor) -> tf.Tensor:
        if embeddings.is_table(variable):
            # Tables have their own words for ids that are out of range.
            return variable.sparse_read(indices)
        return super()._rows(variable, indices)

    # Optimizers.

    @answers("build_optimizer")
    def _build_optimizer(self, call: Call) -> None:
        super()._build_optimizer(call)
        optimizer = call.owner
        if is_wrapper(optimizer):
            return
        for variable in call.get("variables"):
            table = table_of(variable)
            if table is not None:
                decay = weight_decay_of(optimizer, variable)
                # Servers are told its numbers, also where a step that is traced builds it.
                assert self._context is not None
                with tf.init_scope():
                    self._context.tables.set_optimizer(table, optimizer, decay)

    @answers("add_slot")
    def _add_slot(self, call: Call) -> Any:
        optimizer, reference = call.owner, call.get("reference_variable")
        table = table_of(reference)
        if table is None:
            return super()._add_slot(call)
        # Made on the servers already, with all others, in this order: there is nothing to place.
        slot = embeddings.Slot(getattr(reference, "_value", reference), table.new_slot(optimizer))
        return base_optimizer.BaseOptimizer.add_variable_from_reference(
            optimizer, reference, name=call.get("name"), initializer=slot
        )

    def reduce(self, optimizer: Optimizer, grads: Gradients, variables: Variables) -> Gradients:
        tables, dense = _split(variables)
        if not tables:
            return super().reduce(optimizer, grads, variables)
        step = MirroredReplicaStep.current()
        if step is not None:
            # Servers sum what all workers send.
            split = self._split(grads)
            whole = [i for i in tables if id(variables[i]) in step.whole]
            grads = [split[i] if i in whole else g for i, g in enumerate(grads)]
        extended = self.strategy.extended
        if _clips_by_norm(optimizer):
            if extended.barrier is None:
                name = "clipnorm" if optimizer.clipnorm else "global_clipnorm"
                raise ValueError(
                    f"`{name}` needs the sum of all workers' gradients, which `sync=False` does "
                    "not make: use `clipvalue`, or `sync=True`. "
                    f"Received: {name}={getattr(optimizer, name)}"
                )
            for i in tables:
                table = _table_with_rows(variables[i], grads[i])
                extended.push_rows(table, grads[i], optimizer, 0.0, waits=True)
        return _on_dense(super().reduce, optimizer, grads, variables, dense)

    def clip(self, optimizer: Optimizer, grads: Gradients, variables: Variables) -> list[Any]:
        tables, dense = _split(variables)
        if not tables:
            return super().clip(optimizer, grads, variables)
        norm, optimizer.global_clipnorm = optimizer.global_clipnorm, None
        try:
            grads = _on_dense(super().clip, optimizer, grads, variables, dense)
        finally:
            optimizer.global_clipnorm = norm
        if not _clips_by_norm(optimizer):
            return grads
        every = [table for i in tables if (table := table_of(variables[i])) is not None]
        squares = self.strategy.extended.square_of(every)
        if norm:
            own = self._squares(optimizer, [grads[i] for i in dense], [variables[i] for i in dense])
            scale = sums.scale_of([*own, *squares], optimizer)
            scaled = functools.partial(self._scaled, scale)
            grads = _on_dense(scaled, optimizer, grads, variables, dense)
            scales = [scale] * len(tables)
        else:
            scales = [sums.scale_of([one], optimizer) for one in squares]
        for i, scale in zip(tables, scales):
            grads[i] = _Scaled(scale)
        return grads

    # Of gradients of what lies on workers.

    def _squares(self, optimizer: Optimizer, grads: Gradients, variables: Variables) -> list[Any]:
        return sums.squares_of(grads, (), lambda squares: squares)

    def _scaled(
        self, scale: tf.Tensor, optimizer: Optimizer, grads: Gradients, variables: Variables
    ) -> list[Any]:
        return [g if g is None else g * tf.cast(scale, g.dtype) for g in grads]

    def decay(self, optimizer: Optimizer, variables: Sequence[keras.Variable]) -> None:
        super().decay(optimizer, [v for v in variables if table_of(v) is None])

    def push(self, optimizer: Optimizer, grads: Sequence[Any], variables: Sequence[Any]) -> Pairs:
        tables, dense = _split(variables)
        extended, rate = self.strategy.extended, optimizer.learning_rate
        for i in tables:
            gradient, table = grads[i], _table_with_rows(variables[i], grads[i])
            if table.optimizer is not optimizer:
                raise ValueError(
                    f"The table '{table.name}' on parameter servers is updated by another "
                    f"optimizer. Received: {optimizer.name} beside "
                    f"{table.optimizer and table.optimizer.name}"
                )
            if isinstance(gradient, _Scaled):
                extended.commit(table, optimizer, rate, gradient.scale)
            else:
                extended.push_rows(table, gradient, optimizer, rate)
        return super().push(optimizer, [grads[i] for i in dense], [variables[i] for i in dense])

    # Backups.

    def settle(self, model: keras.Model) -> None:
        super().settle(model)
        if self._context is not None:
            self.strategy.extended.flush_caches(self._context.tables.all)

    @functools.cached_property
    def backup_tables(self) -> BackupTables:
        return BackupTables() if self._context is None else self._context.backup_tables

    @answers("train_begin")
    def _begin_training(self, event: Call) -> Any:
        result = super()._begin_training(event)
        model = event.owner.model
        if not self.strategy.sync and self.backup_tables.any_of(model) and self.progress.can_save:
            # For a server that is started again before the first regular one.
            if model.optimizer is not None and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            self.save_now()
        return result

    @property
    def are_servers_preempted(self) -> Callable[[], bool] | None:
        if self._context is None or not self.strategy.is_chief:
            return None
        return self._context.servers.are_told_to_end


class HybridEngine(TableEngine, AllReduceEngine):
    """All-reduce, and tables."""


# Halves of `HybridStrategy` with `shard=`: tables, and the rest of the optimizer in shares.


class _Plan(OptimizerPlan):
    """Leaves tables, and their slots, to the servers."""

    def _is_remote(self, variable: keras.Variable) -> bool:
        return is_table(variable)


if TYPE_CHECKING:

    class _Tables(TableEngine, ShardedEngine):
        pass

else:
    _Tables = TableEngine


class TableSharesEngine(_Tables):
    """Mixin of tables for an engine with shares of all other variables."""

    plan_class = _Plan

    @answers("initialize_with_initializer")
    def _initialize_with_initializer(self, call: Call) -> Any:
        if self._place_of_slot is not None:
            # A slot that is being made in shares is that of no table.
            call.owner._decision = None
        return super()._initialize_with_initializer(call)

    def _squares(self, optimizer: Optimizer, grads: Gradients, variables: Variables) -> list[Any]:
        places = self._placed(optimizer, variables)
        return sums.squares_of(grads, self._parts(grads, places), self._sum_over_parts)

    def _scaled(
        self, scale: tf.Tensor, optimizer: Optimizer, grads: Gradients, variables: Variables
    ) -> list[Any]:
        scaled = super()._scaled(scale, optimizer, grads, variables)
        return self._cut_if_dense(list(grads), scaled, self._placed(optimizer, variables))


class ShardedHybridEngine(TableSharesEngine, ShardedEngine):
    """Cuts what an optimizer keeps."""


class FullyShardedHybridEngine(TableSharesEngine, FullyShardedEngine):
    """Cuts the weights, too."""


class ShardedHybridExtended(TableExtended, ShardedExtended):
    """Additional APIs of `keras_psplus.HybridStrategy` with `shard=`."""


def _split(variables: Sequence[keras.Variable]) -> tuple[list[int], list[int]]:
    tables = [i for i, variable in enumerate(variables) if table_of(variable) is not None]
    return tables, [i for i in range(len(variables)) if i not in tables]


def _on_dense(
    function: Callable[..., Sequence[tf.Tensor | tf.IndexedSlices]],
    optimizer: Optimizer,
    grads: Gradients,
    variables: Variables,
    dense: Sequence[int],
) -> list[Any]:
    """Replaces the dense entries of `grads` by `function`'s result."""
    made = function(optimizer, [grads[i] for i in dense], [variables[i] for i in dense])
    grads = list(grads)
    for i, gradient in zip(dense, made):
        grads[i] = gradient
    return grads


def _clips_by_norm(optimizer: Optimizer) -> bool:
    """Whether an optimizer clips by norms, which need sums before the update."""
    return bool(optimizer.clipnorm or optimizer.global_clipnorm)


def _table_with_rows(variable: keras.Variable, gradient: Any) -> Table:
    """A variable's table; raises ValueError if its gradient is not one of rows."""
    table = table_of(variable)
    assert table is not None
    if not isinstance(gradient, (_Scaled, tf.IndexedSlices)):
        raise ValueError(
            f"The gradient of the table '{table.name}' must be one of rows. Received: {gradient}"
        )
    return table
