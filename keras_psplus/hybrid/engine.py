"""Engine of `HybridStrategy`: that of all-reduce, and tables."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.all_reduce.engine import AllReduceEngine
from keras_psplus.core.backup.backup_tables import BackupTables
from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.engine import Original
from keras_psplus.hybrid.context import TableContext
from keras_psplus.hybrid.tables import embeddings, prefetch, row_gradients
from keras_psplus.hybrid.tables.embeddings import table_of
from keras_psplus.keras_internals.keras_parts import base_optimizer
from keras_psplus.log import info_once, logger


class HybridEngine(AllReduceEngine):
    """For replicas that take steps together, and parameter servers that have tables."""

    # XLA has no operations for rows of tables.
    compiles_by_default = False

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy)
        # Until `fit` makes the iterator over its data; those of validation come later.
        self._awaits_data = False
        self._watch: threading.Thread | None = None

    @property
    def _context(self) -> TableContext | None:
        """Context that tables are made with; None without parameter servers."""
        return self.strategy._context

    # The trainer and its data.

    def train(self, original: Original, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if original.__name__ != "fit" or not self.strategy.prefetch:
            return super().train(original, model, *args, **kwargs)
        # What was read for a batch that did not come any more.
        self.strategy.extended.rows_ahead.forget()
        if model.run_eagerly:
            info_once("no rows are read ahead: the model runs eagerly")
        outer, self._awaits_data = self._awaits_data, not model.run_eagerly
        try:
            return super().train(original, model, *args, **kwargs)
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

    def build(
        self, original: Original, model: keras.Model, iterator: Any = None, data_batch: Any = None
    ) -> None:
        super().build(original, model, iterator, data_batch)
        if self._context is not None and self.strategy.is_chief and self._context.placer.has_news:
            logger.info("HybridStrategy keeps\n%s", self._context.placer.report())

    # Variables.

    def make_variable(
        self,
        original: Original,
        variable: keras.Variable,
        initializer: Any,
        shape: Sequence[int] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        variable._decision = None
        if self._context is not None and shape is not None:
            variable._decision = embeddings.decide(
                self._context.placer, shape, kwargs.get("name"), kwargs.get("dtype")
            )
        return super().make_variable(original, variable, initializer, shape, *args, **kwargs)

    def initialize_with_initializer(
        self, original: Original, variable: keras.Variable, initializer: Any
    ) -> None:
        if isinstance(initializer, embeddings.Slot):
            variable._value = initializer.variable(variable.name)
            return None
        decision = getattr(variable, "_decision", None)
        if decision is None or not decision.on_servers:
            return original(variable, initializer)
        assert self._context is not None
        lookup = self.strategy.extended.lookup
        return embeddings.make(self._context.tables, lookup, variable, decision, initializer)

    def add_weight(
        self, original: Original, layer: keras.Layer, *args: Any, **kwargs: Any
    ) -> keras.Variable:
        variable = original(layer, *args, **kwargs)
        decision = getattr(variable, "_decision", None)
        if decision is not None and decision.on_servers:
            embeddings.take_over(variable)
        return variable

    def reads_rows(self, variable: keras.Variable) -> bool:
        if embeddings.is_table(variable):
            return not embeddings.has_other_value(variable)
        return super().reads_rows(variable)

    def take(self, original: Original, x: Any, indices: Any, axis: int | None = None) -> Any:
        if isinstance(indices, tf.SparseTensor) and axis == 0 and embeddings.is_table(x):
            # As Keras has it: what is missing is row 0.
            indices = tf.sparse.to_dense(indices)
        return super().take(original, x, indices, axis)

    def _rows(self, variable, indices):
        if embeddings.is_table(variable):
            # Tables have their own words for ids that are out of range.
            return variable.sparse_read(indices)
        return super()._rows(variable, indices)

    # Optimizers.

    def build_optimizer(
        self,
        original: Original,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable],
    ) -> None:
        super().build_optimizer(original, optimizer, variables)
        if hasattr(optimizer, "inner_optimizer"):
            return
        for variable in variables:
            table = table_of(variable)
            if table is not None:
                decays = optimizer.weight_decay and optimizer._use_weight_decay(variable)
                decay = optimizer.weight_decay if decays else None
                # Servers are told its numbers, also where a step that is traced builds it.
                assert self._context is not None
                with tf.init_scope():
                    self._context.tables.set_optimizer(table, optimizer, decay)

    def add_slot(
        self,
        original: Original,
        optimizer: keras.optimizers.Optimizer,
        reference_variable: keras.Variable,
        name: str | None = None,
        initializer: Any = "zeros",
    ) -> Any:
        table = table_of(reference_variable)
        if table is None:
            return super().add_slot(original, optimizer, reference_variable, name, initializer)
        # Made on the servers already, with all others, in this order: there is nothing to place.
        value = getattr(reference_variable, "_value", reference_variable)
        slot = embeddings.Slot(value, table.new_slot(optimizer))
        return base_optimizer.BaseOptimizer.add_variable_from_reference(
            optimizer, reference_variable, name=name, initializer=slot
        )

    def reduce(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: list[tf.Tensor | tf.IndexedSlices],
        variables: list[keras.Variable],
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        tables, dense = row_gradients.split(variables)
        if not tables:
            return super().reduce(optimizer, grads, variables)
        step = current_step()
        if step is not None:
            # Servers sum what all workers send.
            split = self._split(grads)
            whole = [i for i in tables if id(variables[i]) in step.whole]
            grads = [split[i] if i in whole else g for i, g in enumerate(grads)]
        extended = self.strategy.extended
        if row_gradients.clips_by_norm(optimizer):
            row_gradients.check_sums(extended, optimizer)
            for i in tables:
                table = table_of(variables[i])
                assert table is not None
                row_gradients.check_rows(table, grads[i])
                extended.push_rows(table, grads[i], optimizer, 0.0, waits=True)
        return row_gradients.on_dense(super().reduce, optimizer, grads, variables, dense)

    def clip(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: list[tf.Tensor | tf.IndexedSlices],
        variables: list[keras.Variable],
    ) -> list[Any]:
        tables, dense = row_gradients.split(variables)
        if not tables:
            return super().clip(optimizer, grads, variables)
        norm, optimizer.global_clipnorm = optimizer.global_clipnorm, None
        try:
            grads = row_gradients.on_dense(super().clip, optimizer, grads, variables, dense)
        finally:
            optimizer.global_clipnorm = norm
        if row_gradients.clips_by_norm(optimizer):
            return row_gradients.clip_by_norm(
                self.strategy.extended, optimizer, grads, variables, tables, dense
            )
        return grads

    def decay(
        self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
    ) -> None:
        super().decay(optimizer, [v for v in variables if table_of(v) is None])

    def push(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[Any],
        variables: Sequence[Any],
    ) -> list[tuple[Any, Any]]:
        tables, dense = row_gradients.split(variables)
        for i in tables:
            row_gradients.apply_on_servers(
                self.strategy.extended, optimizer, grads[i], variables[i], optimizer.learning_rate
            )
        return super().push(optimizer, [grads[i] for i in dense], [variables[i] for i in dense])

    # Backups.

    @functools.cached_property
    def backup_tables(self) -> BackupTables:
        return BackupTables() if self._context is None else self._context.backup_tables

    def begin_training(
        self,
        original: Original,
        callbacks: keras.callbacks.CallbackList,
        logs: dict[str, Any] | None = None,
    ) -> Any:
        result = super().begin_training(original, callbacks, logs)
        model = callbacks.model
        if self.progress.can_save and self.strategy.is_chief and self._context is not None:
            if self._watch is None:
                self._watch = threading.Thread(target=self._watch_servers, daemon=True)
                self._watch.start()
        if not self.strategy.sync and self.backup_tables.any_of(model) and self.progress.can_save:
            # For a server that is started again before the first regular one.
            if model.optimizer is not None and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            self.save_now(callbacks)
        return result

    def _watch_servers(self):
        """Saves the job when a server is told to end, as if this process were."""
        self._context.servers.wait_until_told()
        self.preemption.is_server_told = True
