"""Gradients under `MultiWorkerMirroredStrategy`: tape, loss scale and optimizer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from keras_psplus.all_reduce.step import local_apply
from keras_psplus.all_reduce.step.accumulators import Accumulators
from keras_psplus.core.batch import losses
from keras_psplus.core.batch.replica_step import current_step, current_step_with_batch_fraction
from keras_psplus.core.distributed_engine import DistributedEngine
from keras_psplus.core.graph import local_traces
from keras_psplus.engine import Call, answers
from keras_psplus.tf_internals import framework_ops
from keras_psplus.updates import map_values

if TYPE_CHECKING:
    import keras


class GradientEngine(DistributedEngine):
    """Sums gradients in the optimizer, or as soon as a step computes with them."""

    def gradient(self, call: Call) -> Any:
        step = current_step_with_batch_fraction()
        is_alone = step is None or self.strategy.num_replicas_in_sync == 1
        if is_alone or not losses.is_by_variables(call):
            return losses.gradient(call)
        if self._keeps_own_gradients(step):
            return losses.gradient_of_own_mean(call)
        return losses.note_gradients(call, losses.gradient(call), step, step.tape.note)

    @property
    def _steps_alone(self):
        """Whether replicas take steps by themselves, with `LocalSGD` or `DiLoCo`."""
        return self.strategy.updates is not None and self.strategy.updates.local

    def _keeps_own_gradients(self, step):
        """Whether replicas do not ask each other about the gradients that are being taken."""
        if self._steps_alone:
            return True
        graph = framework_ops.get_default_graph()
        # Eager replicas run one after the other: inside a function, one would wait for the next.
        has_others = self.strategy.extended.world.local_replicas > 1
        would_wait = has_others and step.is_eager and not tf.executing_eagerly()
        return would_wait or local_traces.is_without_collectives(graph, step.graph)

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
        self,
        parts: Sequence[tf.Tensor | tf.IndexedSlices],
        variables: Sequence[Any],
        optimizer: keras.optimizers.Optimizer | None,
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Sums replicas' parts of gradients, by an optimizer's compressors if there is one."""
        variables = [_with_path(variable) for variable in variables]
        sums = [_with_shape(g, v) for g, v in zip(parts, variables)]
        # A row that came twice stays so, as in one process: the step may take norms of rows.
        copied = [
            i for i, g in enumerate(sums) if optimizer is None or isinstance(g, tf.IndexedSlices)
        ]
        others = [i for i in range(len(sums)) if i not in copied]
        sum_all = self.strategy.extended.reducers.sum
        kept = [i for i in range(len(sums)) if _is_overwritten(variables[i])]
        for i, value in zip(kept, self._largest([sums[i] for i in kept])):
            sums[i] = value
        copied, others = ([i for i in one if i not in kept] for one in (copied, others))
        for numbers, owner, kind in ((copied, self, "copy"), (others, optimizer, "gradient")):
            if numbers:
                step = 0 if optimizer is None else tf.convert_to_tensor(optimizer.iterations)
                chosen = [sums[i] for i in numbers], [variables[i] for i in numbers]
                found = sum_all(*chosen, tf.cast(step, tf.int64), owner, kind)
                for i, total in zip(numbers, found):
                    sums[i] = total
        return sums

    def _largest(self, values):
        """Scales and histories of float8, which take their gradient's value, of all replicas."""
        return self.strategy.extended.max_over_replicas(values) if values else []

    def _can_compress(self, optimizer):
        """Whether what is summed before `apply` is what the optimizer would sum in it."""
        return (
            self.strategy.updates is None
            and not hasattr(optimizer, "inner_optimizer")
            and optimizer.loss_scale_factor is None
            and not optimizer.gradient_accumulation_steps
        )

    def _split(self, grads):
        """Gradients of the global batch as parts of each replica, which add up to them."""
        replicas = self.strategy.num_replicas_in_sync
        return [map_values(lambda values: values / replicas, gradient) for gradient in grads]

    def apply(self, call: Call) -> Any:
        step, optimizer = current_step(), call.owner
        if step is None or not step.recording:
            # The inner optimizer of a LossScaleOptimizer gets what that has been given.
            return call.proceed()
        grads, trainable_variables = call.get("grads"), call.get("trainable_variables")
        is_plain = self._can_compress(optimizer)
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        accumulates = bool(inner.gradient_accumulation_steps)
        grads, whole = step.tape.take(
            list(grads), optimizer if is_plain else None, wants_parts=accumulates
        )
        parts = step.zero_if_empty([None if i in whole else g for i, g in enumerate(grads)])
        wholes = [g if i in whole else None for i, g in enumerate(grads)]
        known = inner._trainable_variables if trainable_variables is None else trainable_variables
        known = list(known)
        kept = [i for i, g in enumerate(parts) if g is not None and _is_overwritten(known[i])]
        for i, value in zip(kept, self._largest([parts[i] for i in kept])):
            parts[i] = value
        if self.updating is not None:
            # They are summed when it is time for an update.
            wholes, whole = self._split(wholes), ()
        grads = [part if g is None else g for part, g in zip(parts, wholes)]
        trainable_variables = None if trainable_variables is None else known
        # An optimizer's state changes alike on all replicas; averaging it would only cost bytes.
        step.recording = False
        step.whole, step.writes_back_sums = frozenset(id(known[i]) for i in whole), is_plain
        try:
            if self.updating is None:
                return call.proceed(grads=grads, trainable_variables=trainable_variables)
            return local_apply.apply(
                self.updating, step, call.original, optimizer, grads, trainable_variables
            )
        finally:
            step.recording, step.whole, step.writes_back_sums = True, frozenset(), False

    @answers("check_finite")
    def _check_finite(self, call: Call) -> tf.Tensor:
        finite = call.proceed()
        if not tf.distribute.get_replica_context():
            return finite
        # One replica's overflow must skip the step on all: they would take different branches.
        bad = tf.cast(tf.logical_not(finite), tf.float32)
        return tf.equal(self.strategy.extended.sum_over_replicas([bad])[0], 0.0)

    def reduce(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: list[tf.Tensor | tf.IndexedSlices],
        variables: list[keras.Variable],
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        step = current_step()
        if step is not None and step.alone:
            return grads
        own = [i for i, v in enumerate(variables) if step is None or id(v) not in step.whole]
        if not own:
            return grads
        parts = [_with_shape(grads[i], variables[i]) for i in own]
        of_own = [variables[i] for i in own]
        number = tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.int64)
        sums = self.strategy.extended.reducers.sum(parts, of_own, number, owner=optimizer)
        if step is not None and step.writes_back_sums:
            step.tape.put_sums(of_own, sums)
        grads = list(grads)
        for i, total in zip(own, sums):
            grads[i] = total
        return grads

    def accumulate(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: list[tf.Tensor | tf.IndexedSlices],
        variables: list[keras.Variable],
    ) -> None:
        step = current_step()
        if step is not None and not self._steps_alone:
            self.accumulators.begin_step(optimizer)
        if step is None or not step.whole:
            return super().accumulate(optimizer, grads, variables)
        # They are summed when it is time for an update.
        is_whole, step.whole = [id(v) in step.whole for v in variables], frozenset()
        split = self._split(grads)
        grads = [part if one else g for one, part, g in zip(is_whole, split, grads)]
        return super().accumulate(optimizer, grads, variables)


def _with_shape(gradient, variable):
    """The gradient with its variable's shape: some reach us without a static one."""
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.ensure_shape(gradient.values, [None, *variable.shape[1:]])
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.ensure_shape(gradient, variable.shape)


def _is_overwritten(variable):
    return getattr(variable, "overwrite_with_gradient", False)


class _Path(NamedTuple):
    """Path of a TensorFlow variable, as needed to sum its gradients."""

    path: str
    shape: Any


def _with_path(variable):
    return variable if hasattr(variable, "path") else _Path(variable.name, variable.shape)
