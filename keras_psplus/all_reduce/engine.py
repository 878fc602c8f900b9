"""Engine of `MultiWorkerMirroredStrategy`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus.all_reduce.data import sharding
from keras_psplus.all_reduce.reducers import is_overwritten, with_shape
from keras_psplus.all_reduce.step import mirrored_variables, replica_functions
from keras_psplus.all_reduce.step.replica_step import MirroredReplicaStep
from keras_psplus.all_reduce.step.updating import Accumulators
from keras_psplus.core import data_position, seeds
from keras_psplus.core.base.optimizers import iterations_of, optimizers_of, unwrapped
from keras_psplus.core.batch import losses
from keras_psplus.core.distributed_engine import DistributedEngine, symbolic_batch
from keras_psplus.core.graph import stand_ins
from keras_psplus.core.graph.metrics import accumulates
from keras_psplus.core.jobs import failure
from keras_psplus.core.strategy_engine import StrategyEngine
from keras_psplus.engine import Call, answers
from keras_psplus.keras_internals.keras_parts import callbacks as keras_callbacks
from keras_psplus.tf_internals import framework_ops
from keras_psplus.updates import map_values

if TYPE_CHECKING:
    from keras_psplus.engine import Gradients


# Odd, so that no two replicas of any job share a seed (mod 2 ** 31).
_SEED_STRIDE = 0x3C6EF35F
_WRITE_ONLY = (
    keras_callbacks.CSVLogger,
    keras_callbacks.RemoteMonitor,
    keras_callbacks.TensorBoard,
)


def _writes_only(callback: Any) -> bool:
    return isinstance(callback, _WRITE_ONLY) or getattr(callback, "_writes_only", False)


class AllReduceEngine(DistributedEngine):
    """Engine of replicas that take each step together."""

    has_weights_in_memory = computes_here = True
    # While callbacks of a worker that is not the chief keep track of what the chief writes.
    _writes_nothing = False

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
        progress, world = self.strategy.progress, self.strategy.extended.world
        compiled = self.compiled_calls(call.owner)
        return replica_functions.make_function(progress, world, call, compiled)

    @answers("make_predict_function")
    def _make_predict_function(self, call: Call) -> None:
        progress, world = self.strategy.progress, self.strategy.extended.world
        compiled = self.compiled_calls(call.owner)
        replica_functions.make_predict_function(progress, world, call, compiled)

    @answers("reduce_outputs")
    def _reduce_outputs(self, call: Call) -> Any:
        return replica_functions.reduce_outputs(call)

    def on_padded_batch(self, batch: Any, padded: Any) -> None:
        """Hears of a batch of no rows in whose place a replica computes with another."""

    # Data.

    @property
    def reads_ahead(self) -> bool:
        """Whether the data that are being distributed are to come with the next batch."""
        return False

    @answers("make_iterator")
    def _make_iterator(self, call: Call) -> None:
        iterator = data_position.make_without_data(call)
        distributed = sharding.distribute(
            iterator._distribute_strategy,
            iterator.data_adapter,
            self.progress.data_seed,
            self.reads_ahead,
            iterator.steps_per_epoch,
            iterator.steps_per_execution,
        )
        self.progress.note_data_seed(distributed.seed)
        iterator.data_adapter = distributed.adapter
        iterator._num_batches = distributed.adapter.num_batches
        iterator._distributed_dataset = data_position.ReleasedDataset(distributed.dataset)
        iterator.batch_spec = distributed.batch_spec

    def broadcast_restored(self, variables: Iterable[keras.Variable | tf.Variable]) -> None:
        variables = list(variables)
        mirrored_variables.from_chief(self.strategy, variables)
        self.accumulators.note_assigned(variables)

    # Variables.

    def reads_rows(self, variable: keras.Variable) -> bool:
        return mirrored_variables.can_read_rows(variable)

    @answers("initialize")
    def _initialize(self, call: Call) -> Any:
        # Metric states are made global within the step. As TensorFlow's SyncOnRead variables they
        # would cost a collective for each read, and a chief that saves alone would wait for ever.
        variable = call.owner
        with self.strategy.extended.creating(variable.path, accumulates(variable)):
            return call.proceed()

    def _initialize_with_initializer(self, call: Call) -> Any:
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
        step, variable = MirroredReplicaStep.current(), call.owner
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
        step = MirroredReplicaStep.current()
        assert step is not None
        seed, offset = call.proceed(), step.rank * _SEED_STRIDE % (1 << 31)
        return seed + tf.constant([offset, 0], seed.dtype) if offset else seed

    # Sums and gathers over all replicas for layers and users' steps: an empty replica adds no rows.
    # Gradients of such sums and gathers are sums as well, and pass here.

    @answers("all_reduce")
    def _all_reduce(self, call: Call) -> Any:
        step, value = MirroredReplicaStep.current(), call.get("value")
        assert step is not None
        step.tape.settle()
        name = getattr(call.get("reduce_op"), "value", call.get("reduce_op"))
        if step.may_be_empty and name.upper() == tf.distribute.ReduceOp.SUM.value:
            flat = step.zero_if_empty(tf.nest.flatten(value))
            value = tf.nest.pack_sequence_as(value, flat)
        return call.proceed(value=value)

    @answers("all_gather")
    def _all_gather(self, call: Call) -> Any:
        step, value = MirroredReplicaStep.current(), call.get("value")
        assert step is not None
        step.tape.settle()
        if call.get("axis") == 0:
            value = tf.nest.map_structure(
                lambda t: t if _is_count(t) else step.rows_if_any(tf.convert_to_tensor(t)), value
            )
        return call.proceed(value=value)

    # Gradients: summed in the optimizer, or as soon as a step computes with them.

    def gradient(self, call: Call) -> Any:
        step = MirroredReplicaStep.current()
        is_alone = self.strategy.num_replicas_in_sync == 1 or not losses.is_by_variables(call)
        if step is None or not step.has_batch_fraction or is_alone:
            return losses.gradient(call)
        if self._keeps_own_gradients(step):
            has_seeds = call.get("output_gradients") is not None
            return call.proceed() if has_seeds else losses.gradient_of_own_mean(call)
        return losses.note_gradients(call, losses.gradient(call), step, step.tape.note)

    @property
    def _steps_alone(self) -> bool:
        """Whether replicas take steps by themselves, with `LocalSGD` or `DiLoCo`."""
        return self.strategy.updates is not None and self.strategy.updates.local

    def _keeps_own_gradients(self, step: MirroredReplicaStep) -> bool:
        """Whether replicas do not ask each other about the gradients that are being taken."""
        if self._steps_alone:
            return True
        graph = framework_ops.get_default_graph()
        # Eager replicas run one after the other: inside a function, one would wait for the next.
        has_others = self.strategy.extended.world.local_replicas > 1
        would_wait = has_others and step.is_eager and not tf.executing_eagerly()
        return would_wait or stand_ins.is_without_collectives(graph, step.graph)

    @functools.cached_property
    def accumulators(self) -> Accumulators:
        """Accumulators of optimizers with `gradient_accumulation_steps`."""
        return Accumulators(self.strategy, self.sum_parts)

    def settle(self, model: keras.Model) -> None:
        super().settle(model)
        if not self._steps_alone:
            self.accumulators.make_global(model)

    @property
    def sums_eagerly(self) -> bool:
        """Whether gradients of eager steps are summed as soon as the tape has them."""
        return self.updating is None and not self.strategy.extended.reducers.compresses

    def sum_parts(
        self, parts: Sequence[Any], variables: Sequence[Any], optimizer: Any
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Sums replicas' parts of gradients, by an optimizer's compressors if there is one."""
        reducers = self.strategy.extended.reducers
        return reducers.sum_parts(parts, variables, optimizer, self, self._largest)

    def _largest(self, values: list[tf.Tensor]) -> list[tf.Tensor]:
        """Scales and histories of float8, which take their gradient's value, of all replicas."""
        if not values or self._is_of_one_replica:
            return values
        return self.strategy.extended.max_over_replicas(values)

    def _with_largest(self, grads: Gradients, variables: Sequence[Any]) -> Gradients:
        of_all = list(grads)
        kept = [i for i, g in enumerate(grads) if g is not None and is_overwritten(variables[i])]
        for i, value in zip(kept, self._largest([grads[i] for i in kept])):
            of_all[i] = value
        return of_all

    def _can_compress(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Whether what is summed before `apply` is what the optimizer would sum in it."""
        return (
            self.strategy.updates is None
            and not hasattr(optimizer, "inner_optimizer")
            and optimizer.loss_scale_factor is None
            and not optimizer.gradient_accumulation_steps
        )

    def _split(self, grads: Gradients) -> Gradients:
        """Gradients of the global batch as parts of each replica, which add up to them."""
        replicas = self.strategy.num_replicas_in_sync
        return [map_values(lambda values: values / replicas, gradient) for gradient in grads]

    def apply(self, call: Call) -> Any:
        step, optimizer = MirroredReplicaStep.current(), call.owner
        self._check_step_of_script()
        grads, trained = list(call.get("grads")), call.get("trainable_variables")
        inner = unwrapped(optimizer)
        if step is None:
            known = inner._trainable_variables if trained is None else trained
            return call.proceed(grads=self._with_largest(grads, known))
        if not step.recording:
            # The inner optimizer of a LossScaleOptimizer gets what that has been given.
            return call.proceed()
        is_plain = self._can_compress(optimizer)
        accumulates = bool(inner.gradient_accumulation_steps)
        grads, whole = step.tape.take(grads, optimizer if is_plain else None, accumulates)
        known = list(inner._trainable_variables if trained is None else trained)
        grads = self.parts_of_weights(grads, known) if self.cuts_weights else grads
        parts = step.zero_if_empty([None if i in whole else g for i, g in enumerate(grads)])
        wholes = [g if i in whole else None for i, g in enumerate(grads)]
        parts = self._with_largest(parts, known)
        if self.updating is not None:
            # They are summed when it is time for an update.
            wholes, whole = self._split(wholes), set()
        grads = [part if g is None else g for part, g in zip(parts, wholes)]
        trained = None if trained is None else known
        # An optimizer's state changes alike on all replicas; averaging it would only cost bytes.
        step.recording = False
        step.whole, step.writes_back_sums = frozenset(id(known[i]) for i in whole), is_plain
        try:
            if self.updating is None:
                return call.proceed(grads=grads, trainable_variables=trained)
            return self.updating.take(step, optimizer, grads, trained, call.original)
        finally:
            step.recording, step.whole, step.writes_back_sums = True, frozenset(), False

    @answers("check_finite")
    def _check_finite(self, call: Call) -> tf.Tensor:
        finite = call.proceed()
        if not tf.distribute.get_replica_context() or self._is_of_one_replica:
            return finite
        # One replica's overflow must skip the step on all: they would take different branches.
        bad = tf.cast(tf.logical_not(finite), tf.float32)
        return tf.equal(self.strategy.extended.sum_over_replicas([bad])[0], 0.0)

    def reduce(self, optimizer: Any, grads: list[Any], variables: list[Any]) -> list[Any]:
        if self._is_of_one_replica:
            return [with_shape(gradient, v) for gradient, v in zip(grads, variables)]
        step = MirroredReplicaStep.current()
        if step is not None and step.alone:
            return grads
        own = [i for i, v in enumerate(variables) if step is None or id(v) not in step.whole]
        if not own:
            return grads
        parts = [with_shape(grads[i], variables[i]) for i in own]
        of_own = [variables[i] for i in own]
        number = iterations_of(optimizer)
        sums = self.strategy.extended.reducers.sum(parts, of_own, number, owner=optimizer)
        if step is not None and step.writes_back_sums:
            wholes = self.of_whole_weights(sums, of_own) if self.cuts_weights else sums
            step.tape.put_sums(of_own, wholes)
        grads = list(grads)
        for i, total in zip(own, sums):
            grads[i] = total
        return grads

    @property
    def _is_of_one_replica(self) -> bool:
        """Whether a script takes a step itself, whose gradients are those of all replicas."""
        has_others = self.strategy.extended.world.local_replicas > 1
        return has_others and MirroredReplicaStep.current() is None

    def _check_step_of_script(self) -> None:
        world = self.strategy.extended.world
        if self._is_of_one_replica and world.replicas > world.local_replicas:
            raise RuntimeError(
                "Of several workers that train several replicas each, gradients are summed in "
                "replicas alone: the other replicas of this worker would be waited for. Take the "
                f"step in `strategy.run`. Received: a step outside of it, of {world.replicas} "
                f"replicas, {world.local_replicas} on this worker"
            )

    def accumulate(self, optimizer: Any, grads: list[Any], variables: list[Any]) -> None:
        step = MirroredReplicaStep.current()
        if step is not None and not self._steps_alone:
            self.accumulators.begin_step(optimizer)
        if step is None or not step.whole:
            return super().accumulate(optimizer, grads, variables)
        # They are summed when it is time for an update.
        is_whole, step.whole = [id(v) in step.whole for v in variables], frozenset()
        split = self._split(grads)
        grads = [part if one else g for one, part, g in zip(is_whole, split, grads)]
        return super().accumulate(optimizer, grads, variables)

    # Callbacks and saving.

    @answers("set_model")
    def _set_model(self, event: Call) -> Any:
        if not self.strategy.is_chief:
            every = event.owner
            every.callbacks = [c for c in every.callbacks if not _writes_only(c)]
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


def _is_count(tensor: Any) -> bool:
    # TensorFlow gathers the numbers of rows, to find a replica's part of a gradient.
    return tf.is_tensor(tensor) and tensor.dtype == tf.int32 and tensor.shape == (1,)


# Engine of `MultiWorkerMirroredStrategy` where one replica trains alone.


class OneReplicaEngine(StrategyEngine):
    """Engine of one replica that trains alone: backups that survive a kill."""

    has_weights_in_memory = True

    @property
    def compiles_by_default(self) -> bool:
        return "GPU" in self.strategy.extended.worker_devices[0]

    @answers("compile")
    def _compile(self, call: Call) -> Any:
        result = call.proceed()
        self.resolve_auto_jit(call.owner, call.arguments.get("jit_compile", "auto"))
        return result

    # In a cluster of one, data come in the order in which more workers would read them, so that a
    # job can go on with another number of them.

    @answers("make_iterator")
    def _make_iterator(self, call: Call) -> None:
        # Batches are the data's own: TensorFlow's distributed datasets would make an iterator of
        # several devices for each epoch, which takes 40 ms, and ask it for each step.
        iterator = data_position.make_without_data(call)
        if self.strategy.task is None:
            iterator._distributed_dataset = iterator.data_adapter.get_tf_dataset()
            return
        seed = self.progress.data_seed(seeds.draw())
        iterator._distributed_dataset = sharding.of_one_replica(iterator.data_adapter, seed)
        self.progress.note_data_seed(seed)

    def build(self, call: Call) -> None:
        iterator, data_batch = call.get("iterator"), call.get("data_batch")
        if iterator is not None:
            # Keras would draw a batch to see its shapes, and shuffles that change their order from
            # pass to pass would be one pass further than in one process.
            data_batch = symbolic_batch(iterator._distributed_dataset.element_spec)
        call.proceed(iterator=None, data_batch=data_batch)

    @answers("make_function")
    def _make_function(self, call: Call) -> Callable[..., Any]:
        function = call.proceed(
            step_function=replica_functions.after_data(call.get("step_function"))
        )
        return replica_functions.in_progress(self.strategy.progress, call, function)

    def broadcast_restored(self, variables: Iterable[keras.Variable | tf.Variable]) -> None:
        mirrored_variables.from_chief(self.strategy, variables)

    def reads_rows(self, variable: keras.Variable) -> bool:
        return mirrored_variables.can_read_rows(variable)
