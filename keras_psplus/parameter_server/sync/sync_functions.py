"""Functions of a synchronous step: a worker's share, and the chief's update.

Without backup workers, a worker's function adds each gradient to the sums on the parameter servers
as soon as it is computed. With backup workers it keeps the gradients until the chief knows that
they are among the first, and a second function sends them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.base.optimizers import scalar_tensor, unwrapped
from keras_psplus.core.batch import duplicate_rows
from keras_psplus.core.graph.stand_ins import Gradient
from keras_psplus.parameter_server.context import StepContext
from keras_psplus.parameter_server.steps.step_functions import StepFunctions, TracedStep
from keras_psplus.parameter_server.sync.overlap import HandedOver, OverlapPlanner, SyncFunction
from keras_psplus.parameter_server.sync.replica_step import WorkerReplicaStep
from keras_psplus.parameter_server.tracing import remote, traffic, worker_function
from keras_psplus.parameter_server.tracing.worker_function import Trace
from keras_psplus.parameter_server.transport import aggregation
from keras_psplus.parameter_server.transport.sharded import ShardParts


class SyncFunctions:
    """The functions of one step function, one `SyncFunction` for each form of its batches."""

    def __init__(
        self,
        context: StepContext,
        step: Callable[..., Any],
        collect: Callable[[Trace, list[Any]], tuple[tf.Tensor, Any, Any]],
        weights: Callable[[], Iterable[tf.Variable]],
    ) -> None:
        self._context, self._collect = context, collect
        self._pushes_later = context.attempts.backup_workers > 0
        args = context, step, self._with_gradients, weights, self._replica_step
        self._functions = StepFunctions(*args)
        self._overlaps = OverlapPlanner(context, self._on_chief)
        self._on_copies = StepFunctions(*args, begin=self._overlaps.begin)
        self._made: dict[int, SyncFunction] = {}
        self._discards: dict[int, Callable[[int], None]] = {}
        # Those of this generation, by the step's id.
        self._overlapping: dict[int, SyncFunction | None] = {}
        self._generation = 0

    def __call__(self, batch: Any) -> tuple[SyncFunction, Any]:
        """The functions for a share's batch, and their argument besides closure variables."""
        step, payload = self._functions([batch])
        if id(step) not in self._made:
            self._made[id(step)] = self._make(step)
        return self._made[id(step)], payload

    def begin_generation(self) -> None:
        """Has overlapping steps share nothing with those so far, of which some may still wait."""
        self._generation += 1
        self._overlapping.clear()

    def discard(self, stamp: int) -> None:
        """Forgets what attempts before a stamp have added, with batches of any form."""
        for key, function in self._made.items():
            # A step without an optimizer adds nothing.
            if function.added and key not in self._discards:
                self._discards[key] = self._make_discard(function.added)
            if key in self._discards:
                self._discards[key](stamp)

    def _replica_step(self, initial: tf.Tensor) -> WorkerReplicaStep:
        stamp = tf.cast(initial[-1], tf.int64)
        push = HandedOver if self._pushes_later else lambda *args: self._add(stamp, *args)
        return WorkerReplicaStep(self._context.engine, initial[-2], push)

    def _with_gradients(self, trace: Trace, results: list[Any]) -> tuple[tf.Tensor, Any, Any]:
        vector, _, notes = self._collect(trace, results)
        own, outputs = WorkerReplicaStep.current(), list[Any]()
        if self._pushes_later and own is not None:
            outputs = [[_leaves(g) for g in one.gradients] for one in own.handed_over]
        return vector, outputs, notes

    def _add(
        self,
        stamp: tf.Tensor,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Gradient | None],
        variables: Sequence[keras.Variable],
        made: Sequence[Gradient | None] | None = None,
    ) -> HandedOver:
        """Sends a worker's gradients; `made` are those of its step, if these are copies."""
        inner = unwrapped(optimizer)
        by_value = {id(variable._value): variable for variable in variables}
        prefix = self._context.extended.worker_states.prefix
        values = [variable._value for variable in variables]
        found = zip(gradients if made is None else made, values)
        # Copies that are sent do not show it any more.
        joins = {id(value): duplicate_rows.whole_of(one) for one, value in found}
        with traffic.timing_push(gradients):
            after = self._overlaps.before_adding()
            pairs = self._context.push(inner, gradients, values)
            sums = aggregation.add(pairs, stamp, prefix, after, joins)
        return HandedOver(optimizer, sums, [by_value[id(value)] for _, value in pairs])

    def _make(self, step: TracedStep) -> SyncFunction:
        assert step.replica_step is not None
        push, added = None, step.replica_step.handed_over
        if self._pushes_later:
            push, added = self._make_push(step)

        def update(stamp: tf.Tensor, count: tf.Tensor, scale: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            return self._apply(added, stamp, count, scale)

        apply = self._on_chief(update, *aggregation.UPDATE_SPECS)
        return SyncFunction(step, push, added, apply)

    def overlapping(self, function: SyncFunction, batch: Any) -> SyncFunction | None:
        """A step's functions that overlap with the next one; None if they cannot."""
        key = id(function.step)
        if key not in self._overlapping:
            self._overlapping[key] = self._overlaps.make(
                function,
                functools.partial(self._apply, function.added),
                self._generation,
                lambda: self._on_copies([batch])[0],
            )
        return self._overlapping[key]

    def _make_push(self, step: TracedStep) -> tuple[traffic.CountedFunction, list[HandedOver]]:
        assert step.replica_step is not None
        pending, added = step.replica_step.handed_over, list[HandedOver]()

        def push(stamp: tf.Tensor, parts: Any) -> None:
            for (optimizer, gradients, variables), own in zip(pending, parts):
                values = [_gradient(like, leaves) for like, leaves in zip(gradients, own)]
                added.append(self._add(stamp, optimizer, values, variables, gradients))

        specs = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), step.concrete.structured_outputs[1]
        )
        return traffic.counted(self._context.strategy, push, aggregation.STAMP, specs), added

    def _apply(
        self, added: list[HandedOver], stamp: tf.Tensor, count: tf.Tensor, scale: tf.Tensor
    ) -> tf.Tensor:
        """Has optimizers apply the sums, in a function that is traced."""
        for optimizer, sums, variables in added:
            gradients = aggregation.take(sums, stamp, count, scale)
            if _needs_whole(optimizer):
                gradients = [_joined(g, v._value) for g, v in zip(gradients, variables)]
            with worker_function.applying_sums_flag.raised():
                if variables:
                    optimizer.apply(gradients, variables)
                else:
                    optimizer.iterations.assign_add(1)
        return tf.constant(True)

    def _make_discard(self, added: list[HandedOver]) -> Callable[[int], None]:
        def discard(stamp: tf.Tensor) -> tf.Tensor:
            for _, sums, _ in added:
                for one in aggregation.each(sums):
                    one.discard(stamp)
            return tf.constant(True)

        return self._on_chief(discard, aggregation.STAMP)

    def _on_chief(self, function: Callable[..., Any], *specs: tf.TensorSpec) -> Any:
        def in_replica(*args: tf.Tensor) -> Any:
            with tf.device(remote.CHIEF):
                return self._context.strategy.run(function, args)

        origin = tf.function(in_replica, autograph=False)
        with self._context.strategy.scope():
            concrete = origin.get_concrete_function(*specs)

        def call(*args: Any) -> Any:
            with tf.device(remote.CHIEF):
                given = (scalar_tensor(a, spec.dtype) for a, spec in zip(args, specs))
                return remote.call(concrete, *given)

        vars(call).update(concrete=concrete, origin=origin)
        return call


def _leaves(gradient: Gradient | None) -> tuple[tf.Tensor, ...]:
    if gradient is None:
        return ()
    if isinstance(gradient, tf.IndexedSlices):
        return gradient.values, gradient.indices
    return (tf.convert_to_tensor(gradient),)


def _gradient(like: Gradient | None, leaves: Sequence[tf.Tensor]) -> Gradient | None:
    if like is None:
        return None
    return tf.IndexedSlices(*leaves) if isinstance(like, tf.IndexedSlices) else leaves[0]


def _needs_whole(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer computes with a gradient before it updates the variable's shards."""
    inner = unwrapped(optimizer)
    return bool(
        inner is not optimizer
        or inner.gradient_accumulation_steps
        or inner.loss_scale_factor
        or any(_needs_whole(one) for one in getattr(inner, "optimizers", ()))
    )


def _joined(gradient: Any, variable: Any) -> Any:
    if not isinstance(gradient, ShardParts):
        return gradient
    if not isinstance(gradient[0], tf.IndexedSlices):
        return tf.concat(gradient, 0)
    indices = [
        part.indices + tf.cast(first, part.indices.dtype)
        for part, first in zip(gradient, variable.offsets)
    ]
    indices = tf.concat(indices, 0)
    return tf.IndexedSlices(
        tf.concat([part.values for part in gradient], 0),
        indices,
        tf.constant(variable.shape.as_list(), indices.dtype),
    )
