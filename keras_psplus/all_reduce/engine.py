"""Engine of `MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus.all_reduce.data import sharding
from keras_psplus.all_reduce.gradient_engine import GradientEngine
from keras_psplus.all_reduce.step import replica_functions, row_reads, single_steps
from keras_psplus.core.base.metric_state import accumulates
from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.core.data import iterator_release
from keras_psplus.core.distributed_engine import symbolic_batch
from keras_psplus.core.jobs import failure
from keras_psplus.core.strategy_engine import StrategyEngine
from keras_psplus.engine import Original
from keras_psplus.keras_internals.keras_parts import Variable, epoch_iterator, stateless_scope, tree
from keras_psplus.keras_internals.keras_parts import callbacks as keras_callbacks

if TYPE_CHECKING:
    from keras_psplus.all_reduce.reduction.mirrored_state import MirroredState
    from keras_psplus.all_reduce.step.updating import MirroredUpdates
    from keras_psplus.core.jobs.control import ControlPlane

# Odd, so that no two replicas of any job share a seed (mod 2 ** 31).
_SEED_STRIDE = 0x3C6EF35F
_WRITE_ONLY = (
    keras_callbacks.CSVLogger,
    keras_callbacks.RemoteMonitor,
    keras_callbacks.TensorBoard,
)


class MirroredEngine(StrategyEngine):
    """For replicas that have all weights: backups that survive a kill."""

    has_weights_in_memory = True

    @property
    def control(self) -> ControlPlane | None:
        return self.strategy.extended.control

    @property
    def worker_state(self) -> MirroredState:
        return self.strategy.extended.worker_state

    @property
    def updating(self) -> MirroredUpdates | None:
        return self.strategy.extended.updating

    def broadcast_restored(self, variables: Iterable[keras.Variable | tf.Variable]) -> None:
        # The disk need not be shared.
        if self.control is not None:
            with tf.init_scope():
                values = [v._value if isinstance(v, Variable) else v for v in variables]
                self.strategy.extended.broadcast(values)

    def reads_rows(self, variable: keras.Variable) -> bool:
        return not stateless_scope.in_stateless_scope() and row_reads.are_enabled(variable._value)


class OneReplicaEngine(MirroredEngine):
    """For one replica that trains alone."""

    # In a cluster of one, data come in the order in which more workers would read them, so that a
    # job can go on with another number of them.

    def make_iterator(
        self,
        original: Original,
        iterator: Any,
        distribute_strategy: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if self.strategy.task is None:
            original(iterator, distribute_strategy, *args, **kwargs)
            return
        epoch_iterator.EpochIterator.__init__(iterator, *args, **kwargs)
        iterator._distribute_strategy = distribute_strategy
        seed = self.progress.data_seed(random.randint(1, int(1e9)))
        dataset = sharding.of_one_replica(iterator.data_adapter, seed)
        if not isinstance(dataset, tf.distribute.DistributedDataset):
            dataset = distribute_strategy.experimental_distribute_dataset(dataset)
        self.progress.note_data_seed(seed)
        iterator._distributed_dataset = dataset

    def build(
        self, original: Original, model: keras.Model, iterator: Any = None, data_batch: Any = None
    ) -> None:
        if iterator is not None:
            # Keras would draw a batch to see its shapes, and shuffles that change their order from
            # pass to pass would be one pass further than in one process.
            data_batch = symbolic_batch(iterator._distributed_dataset.element_spec)
        original(model, data_batch=data_batch)

    def make_function(
        self, original: Original, model: keras.Model, step_function: Callable[..., Any]
    ) -> Callable[..., Any]:
        return original(model, single_steps.after_data(step_function))


class AllReduceEngine(MirroredEngine, GradientEngine):
    """For replicas that take each step together."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy)
        # While callbacks of a worker that is not the chief keep track of what the chief writes.
        self._writes_nothing = False

    can_compile = True

    @property
    def compiles_by_default(self) -> bool:
        return "GPU" in self.strategy.extended.worker_devices[0]

    # The trainer.

    def translate_errors(self) -> contextlib.AbstractContextManager[None]:
        return failure.translate_errors(self.strategy.task)

    def build(
        self, original: Original, model: keras.Model, iterator: Any = None, data_batch: Any = None
    ) -> None:
        super().build(original, model, iterator, data_batch)
        if self.strategy.updates is not None:
            assert self.updating is not None
            # Before the first step.
            for optimizer in optimizers_of(model).values():
                if optimizer.built:
                    self.updating.prepare(optimizer, optimizer._trainable_variables)

    def make_function(
        self, original: Original, model: keras.Model, step_function: Callable[..., Any]
    ) -> Callable[..., Any]:
        strategy, compiled = self.strategy, self.compiled_calls(model)
        return replica_functions.make_function(
            strategy.progress, strategy.extended.world, original, model, step_function, compiled
        )

    def make_predict_function(
        self, original: Original, model: keras.Model, force: bool = False
    ) -> None:
        strategy, compiled = self.strategy, self.compiled_calls(model)
        replica_functions.make_predict_function(
            strategy.progress, strategy.extended.world, original, model, force, compiled
        )

    def reduce_outputs(
        self, original: Original, values: Any, strategy: tf.distribute.Strategy, reduction: str
    ) -> Any:
        if reduction == "auto":
            # The replica step has made them equal on all replicas.
            return tree.map_structure(lambda v: strategy.experimental_local_results(v)[0], values)
        gather = strategy.extended.gather_rows
        if tf.executing_eagerly():
            gather = tf.function(gather, autograph=False)
        return tree.map_structure(gather, values)

    def on_padded_batch(self, batch: Any, padded: Any) -> None:
        """Hears of a batch of no rows in whose place a replica computes with another."""

    # Data.

    @property
    def reads_ahead(self) -> bool:
        """Whether the data that are being distributed are to come with the next batch."""
        return False

    def make_iterator(
        self,
        original: Original,
        iterator: Any,
        distribute_strategy: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        epoch_iterator.EpochIterator.__init__(iterator, *args, **kwargs)
        iterator._distribute_strategy = strategy = distribute_strategy
        distributed = sharding.distribute(
            strategy,
            iterator.data_adapter,
            self.progress.data_seed,
            self.reads_ahead,
            iterator.steps_per_epoch,
        )
        self.progress.note_data_seed(distributed.seed)
        iterator.data_adapter = distributed.adapter
        iterator._num_batches = distributed.adapter.num_batches
        iterator._distributed_dataset = iterator_release.Dataset(distributed.dataset)
        iterator.batch_spec = distributed.batch_spec

    def broadcast_restored(self, variables: Iterable[keras.Variable | tf.Variable]) -> None:
        variables = list(variables)
        super().broadcast_restored(variables)
        self.accumulators.note_assigned(variables)

    # Variables.

    def initialize(self, original: Original, variable: keras.Variable, value: Any) -> Any:
        # Metric states are made global within the step. As TensorFlow's SyncOnRead variables they
        # would cost a collective for each read, and a chief that saves alone would wait for ever.
        with self.strategy.extended.creating(variable.path, accumulates(variable)):
            return original(variable, value)

    def add_slot(
        self,
        original: Original,
        optimizer: keras.optimizers.Optimizer,
        reference_variable: keras.Variable,
        name: str | None = None,
        initializer: Any = "zeros",
    ) -> keras.Variable:
        if type(keras.initializers.get(initializer)) is not keras.initializers.Zeros:
            return original(optimizer, reference_variable, name, initializer)
        with self.strategy.extended.creating_zeros():
            return original(optimizer, reference_variable, name, initializer)

    def assign(self, original: Original, variable: keras.Variable, value: Any) -> Any:
        step = current_step()
        if step is None:
            self.accumulators.note_assigned([variable])
        elif step.recording:
            if accumulates(variable):
                step.record_total(variable._value)
            elif variable._value.dtype.is_floating:
                step.record(variable._value)
        return original(variable, value)

    def metric_attribute(self, original: Original, metric: keras.metrics.Metric, name: str) -> Any:
        attribute = super().metric_attribute(original, metric, name)
        if name != "result" or not tf.executing_eagerly():
            return attribute
        # What the step computes from the result cannot be computed once more.
        return functools.partial(_global_result, current_step(), metric, attribute)

    def next_seed(
        self, original: Original, generator: keras.random.SeedGenerator, ordered: bool = True
    ) -> tf.Tensor:
        # The state stays one value on all replicas, so that it can be saved and restored; what is
        # drawn from it differs, or all replicas would drop the same units of different rows.
        seed, offset = original(generator, ordered), current_step().rank * _SEED_STRIDE % (1 << 31)
        return seed + tf.constant([offset, 0], seed.dtype) if offset else seed

    # What layers and users' steps ask of all replicas: one without its own rows adds none.
    # Gradients of such sums and gathers are sums as well, and pass here.

    def all_reduce_in_step(
        self,
        original: Original,
        context: tf.distribute.ReplicaContext,
        reduce_op: tf.distribute.ReduceOp | str,
        value: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        step = current_step()
        step.tape.settle()
        if step.may_be_empty and _is_sum(reduce_op):
            flat = step.zero_if_empty(tf.nest.flatten(value))
            value = tf.nest.pack_sequence_as(value, flat)
        return original(context, reduce_op, value, *args, **kwargs)

    def all_gather_in_step(
        self,
        original: Original,
        context: tf.distribute.ReplicaContext,
        value: Any,
        axis: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        step = current_step()
        step.tape.settle()
        if axis == 0:
            value = tf.nest.map_structure(
                lambda t: t if _is_count(t) else step.rows_if_any(tf.convert_to_tensor(t)), value
            )
        return original(context, value, axis, *args, **kwargs)

    # Callbacks.

    def set_callbacks_model(
        self, original: Original, callbacks: keras.callbacks.CallbackList, model: keras.Model
    ) -> Any:
        if not self.strategy.is_chief:
            kept = [c for c in callbacks.callbacks if not isinstance(c, _WRITE_ONLY)]
            callbacks.callbacks = kept
        return super().set_callbacks_model(original, callbacks, model)

    def save_checkpoint(
        self,
        original: Original,
        callback: keras.callbacks.ModelCheckpoint,
        epoch: int,
        batch: int | None,
        logs: dict[str, Any] | None,
    ) -> Any:
        # A worker that is not the chief keeps track of the best value, and writes nothing.
        outer, self._writes_nothing = self._writes_nothing, not self.strategy.is_chief
        try:
            return super().save_checkpoint(original, callback, epoch, batch, logs)
        finally:
            self._writes_nothing = outer

    def save(
        self,
        original: Original,
        model: keras.Model,
        filepath: Any,
        overwrite: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._writes_nothing:
            return None
        self.accumulators.warn_if_partial(model)
        return super().save(original, model, filepath, overwrite, *args, **kwargs)


def _global_result(step, metric, result, *args, **kwargs):
    """Calls a metric's `result` in an eager step, with the states of all replicas."""
    if tf.executing_eagerly() and step is current_step() and step.has_batch_fraction:
        step.asked_metrics.add(id(metric))
        step.synchronise_totals([variable._value for variable in metric.variables])
    return result(*args, **kwargs)


def _is_sum(reduce_op):
    name = reduce_op if isinstance(reduce_op, str) else reduce_op.value
    return name.upper() == tf.distribute.ReduceOp.SUM.value


def _is_count(tensor):
    # TensorFlow gathers the numbers of rows, to find a replica's part of a gradient.
    return tf.is_tensor(tensor) and tensor.dtype == tf.int32 and tensor.shape == (1,)
