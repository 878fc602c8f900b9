"""Engine of `MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.all_reduce.data import sharding
from keras_psplus.all_reduce.gradient_engine import GradientEngine
from keras_psplus.all_reduce.step import broadcast, replica_functions, row_reads, single_steps
from keras_psplus.core.base.metric_state import accumulates
from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.core.data import epochs, iterator_release
from keras_psplus.core.distributed_engine import symbolic_batch
from keras_psplus.core.jobs import failure
from keras_psplus.core.strategy_engine import StrategyEngine
from keras_psplus.engine import Call, answers
from keras_psplus.keras_internals.keras_parts import callbacks as keras_callbacks
from keras_psplus.keras_internals.keras_parts import tree

# Odd, so that no two replicas of any job share a seed (mod 2 ** 31).
_SEED_STRIDE = 0x3C6EF35F
_WRITE_ONLY = (
    keras_callbacks.CSVLogger,
    keras_callbacks.RemoteMonitor,
    keras_callbacks.TensorBoard,
)


class OneReplicaEngine(StrategyEngine):
    """For one replica that trains alone: backups that survive a kill."""

    has_weights_in_memory = True

    # In a cluster of one, data come in the order in which more workers would read them, so that a
    # job can go on with another number of them.

    @answers("make_iterator")
    def _make_iterator(self, call: Call) -> None:
        if self.strategy.task is None:
            call.proceed()
            return
        iterator = epochs.make_without_data(call)
        seed = self.progress.data_seed(random.randint(1, int(1e9)))
        dataset = sharding.of_one_replica(iterator.data_adapter, seed)
        if not isinstance(dataset, tf.distribute.DistributedDataset):
            dataset = iterator._distribute_strategy.experimental_distribute_dataset(dataset)
        self.progress.note_data_seed(seed)
        iterator._distributed_dataset = dataset

    def build(self, call: Call) -> None:
        iterator, data_batch = call.get("iterator"), call.get("data_batch")
        if iterator is not None:
            # Keras would draw a batch to see its shapes, and shuffles that change their order from
            # pass to pass would be one pass further than in one process.
            data_batch = symbolic_batch(iterator._distributed_dataset.element_spec)
        call.proceed(iterator=None, data_batch=data_batch)

    @answers("make_function")
    def _make_function(self, call: Call) -> Callable[..., Any]:
        return call.proceed(step_function=single_steps.after_data(call.get("step_function")))

    def broadcast_restored(self, variables: Iterable[keras.Variable | tf.Variable]) -> None:
        broadcast.from_chief(self.strategy, variables)

    def reads_rows(self, variable: keras.Variable) -> bool:
        return row_reads.can_read(variable)


class AllReduceEngine(GradientEngine):
    """For replicas that take each step together."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy)
        # While callbacks of a worker that is not the chief keep track of what the chief writes.
        self._writes_nothing = False

    has_weights_in_memory = can_compile = True

    @property
    def compiles_by_default(self) -> bool:
        return "GPU" in self.strategy.extended.worker_devices[0]

    # The trainer.

    def translate_errors(self) -> contextlib.AbstractContextManager[None]:
        return failure.translate_errors(self.strategy.task)

    def build(self, call: Call) -> None:
        super().build(call)
        if self.strategy.updates is not None:
            # Before the first step.
            for optimizer in optimizers_of(call.owner).values():
                if optimizer.built:
                    self.updating.prepare(optimizer, optimizer._trainable_variables)

    @answers("make_function")
    def _make_function(self, call: Call) -> Callable[..., Any]:
        strategy, compiled = self.strategy, self.compiled_calls(call.owner)
        return replica_functions.make_function(
            strategy.progress, strategy.extended.world, call, compiled
        )

    @answers("make_predict_function")
    def _make_predict_function(self, call: Call) -> None:
        strategy, compiled = self.strategy, self.compiled_calls(call.owner)
        replica_functions.make_predict_function(
            strategy.progress, strategy.extended.world, call, compiled
        )

    @answers("reduce_outputs")
    def _reduce_outputs(self, call: Call) -> Any:
        values, strategy = call.owner, call.get("strategy")
        if call.get("reduction") == "auto":
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

    @answers("make_iterator")
    def _make_iterator(self, call: Call) -> None:
        iterator = epochs.make_without_data(call)
        distributed = sharding.distribute(
            iterator._distribute_strategy,
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
        broadcast.from_chief(self.strategy, variables)
        self.accumulators.note_assigned(variables)

    # Variables.

    def reads_rows(self, variable: keras.Variable) -> bool:
        return row_reads.can_read(variable)

    @answers("initialize")
    def _initialize(self, call: Call) -> Any:
        # Metric states are made global within the step. As TensorFlow's SyncOnRead variables they
        # would cost a collective for each read, and a chief that saves alone would wait for ever.
        variable = call.owner
        with self.strategy.extended.creating(variable.path, accumulates(variable)):
            return call.proceed()

    @answers("add_slot")
    def _add_slot(self, call: Call) -> keras.Variable:
        initializer = call.get("initializer", "zeros")
        if type(keras.initializers.get(initializer)) is not keras.initializers.Zeros:
            return call.proceed()
        with self.strategy.extended.creating_zeros():
            return call.proceed()

    @answers("assign")
    def _assign(self, call: Call) -> Any:
        step, variable = current_step(), call.owner
        if step is None:
            self.accumulators.note_assigned([variable])
        elif step.recording:
            if accumulates(variable):
                step.record_total(variable._value)
            elif variable._value.dtype.is_floating:
                step.record(variable._value)
        return call.proceed()

    @answers("next_seed")
    def _next_seed(self, call: Call) -> tf.Tensor:
        # The state stays one value on all replicas, so that it can be saved and restored; what is
        # drawn from it differs, or all replicas would drop the same units of different rows.
        seed, offset = call.proceed(), current_step().rank * _SEED_STRIDE % (1 << 31)
        return seed + tf.constant([offset, 0], seed.dtype) if offset else seed

    # What layers and users' steps ask of all replicas: one without its own rows adds none.
    # Gradients of such sums and gathers are sums as well, and pass here.

    @answers("all_reduce")
    def _all_reduce(self, call: Call) -> Any:
        step, value = current_step(), call.get("value")
        step.tape.settle()
        if step.may_be_empty and _is_sum(call.get("reduce_op")):
            flat = step.zero_if_empty(tf.nest.flatten(value))
            value = tf.nest.pack_sequence_as(value, flat)
        return call.proceed(value=value)

    @answers("all_gather")
    def _all_gather(self, call: Call) -> Any:
        step, value = current_step(), call.get("value")
        step.tape.settle()
        if call.get("axis") == 0:
            value = tf.nest.map_structure(
                lambda t: t if _is_count(t) else step.rows_if_any(tf.convert_to_tensor(t)), value
            )
        return call.proceed(value=value)

    # Callbacks and saving.

    @answers("set_model")
    def _set_model(self, event: Call) -> Any:
        if not self.strategy.is_chief:
            callbacks = event.owner
            kept = [c for c in callbacks.callbacks if not isinstance(c, _WRITE_ONLY)]
            callbacks.callbacks = kept
        return super()._set_model(event)

    @answers("checkpoint")
    def _save_checkpoint(self, event: Call) -> Any:
        # A worker that is not the chief keeps track of the best value, and writes nothing.
        outer, self._writes_nothing = self._writes_nothing, not self.strategy.is_chief
        try:
            return super()._save_checkpoint(event)
        finally:
            self._writes_nothing = outer

    @answers("save", "save_weights")
    def _save(self, call: Call) -> Any:
        if self._writes_nothing:
            return None
        self.accumulators.warn_if_partial(call.owner)
        return super()._save(call)


def _is_sum(reduce_op):
    name = reduce_op if isinstance(reduce_op, str) else reduce_op.value
    return name.upper() == tf.distribute.ReduceOp.SUM.value


def _is_count(tensor):
    # TensorFlow gathers the numbers of rows, to find a replica's part of a gradient.
    return tf.is_tensor(tensor) and tensor.dtype == tf.int32 and tensor.shape == (1,)
