"""Functions of a synchronous step: a worker's share, and the chief's update, which may overlap.

Without backup workers, a worker's function adds each gradient to the sums on the parameter servers
as soon as it is computed. With backup workers it keeps the gradients until the chief knows that
they are among the first, and a second function sends them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_psplus.core.base.optimizers import loss_scale, scalar_tensor, unwrapped
from keras_psplus.core.batch import duplicate_rows
from keras_psplus.core.graph.stand_ins import Gradient
from keras_psplus.log import logger
from keras_psplus.parameter_server import aggregation, pulls, traffic, worker_function
from keras_psplus.parameter_server.aggregation import GradientSum
from keras_psplus.parameter_server.context import StepContext
from keras_psplus.parameter_server.pulls import (
    GATHERS,
    Pulls,
    ShardParts,
    WholeRead,
    parts_of,
    uses,
    written_by,
)
from keras_psplus.parameter_server.replica_step import BatchSums, WorkerReplicaStep
from keras_psplus.parameter_server.state import WorkerVariable
from keras_psplus.parameter_server.step_functions import StepFunctions, TracedStep, are_same
from keras_psplus.parameter_server.traffic import CountedFunction, counted
from keras_psplus.parameter_server.worker_function import Trace, is_on_ps
from keras_psplus.tables.row_variable import is_keyed
from keras_psplus.tf_internals import framework_ops as ops

# Overlap of synchronous steps: workers fetch new weights while gradients are being sent.
#
# A worker's link is used in both directions, and training is the same. For variables w1 to w3,
# whose gradients g3 to g1 are computed from the last layer back:
#
#     worker -> server   | forward |    g3   g2   g1  |
#     server             |              u3   u2   u1  |    u: update, once all workers' g are there
#     server -> worker   |                w3   w2   w1|    into the worker's copies
#     next step                                       | forward |
#
# 1. Each worker computes on its copies, and adds each gradient to the sum on the variable's server
#    as soon as it is computed.
# 2. Meanwhile the update runs: for each variable it waits for all workers' gradients, writes the
#    new value, and announces it to every worker. `Undo` keeps the values from before.
# 3. Each worker fetches announced values into its copies, from which the next step starts.
# 4. If a worker is lost, zeros complete the sums (`release`), and `Undo` restores the variables.


class _Part(NamedTuple):
    variable: tf.Variable
    read: WholeRead
    name: str


# A worker's function of a step reads its copies. As soon as a variable's update is made on its
# server, which is when the gradients of all workers for it have arrived there, the new value is
# sent to the copies for the next step, while other gradients are still being sent.
class WorkerCopies:
    def __init__(self, context: StepContext, whole_reads: Sequence[WholeRead]) -> None:
        self._context, self._states = context, context.extended.worker_states
        self._reads = whole_reads
        self._parts = {
            id(part): _Part(part, read, f"copies/{part._unique_id}")
            for read in whole_reads
            for part in read.parts
        }
        parts = list(self._parts.values())
        groups = pulls.groups([part.variable for part in parts])
        self._groups = [[parts[place] for place in places] for places in groups]
        forms = {part.name: (part.variable.shape, part.variable.dtype) for part in parts}
        self._states.register(forms, are_saved=False)

    def keep_in(self, pulls: Pulls) -> None:
        """Has the function that is being traced read the copies, before anything else."""
        for read in self._reads:
            values = [self._copy(self._parts[id(part)]).read_value() for part in read.parts]
            value = values[0] if len(values) == 1 else tf.concat(values, 0)
            pulls.keep(read.variable, read.parts, value)

    def _copy(self, part: _Part) -> WorkerVariable:
        form = part.variable.shape, part.variable.dtype
        return WorkerVariable(self._states.handle(part.name, *form), *form)

    def announce(self, readers: tf.Tensor, generation: int) -> None:
        """Lets `readers` workers of a generation read what the traced function has updated."""
        for number, group in enumerate(self._groups):
            # Out here: a function makes its handles in order, and would wait for values in between.
            queue = self._queue(number, generation)
            with tf.device(group[0].variable.device):
                # After their updates, in the order of the function.
                values = [pulls.raw_read(part.variable) for part in group]
                with tf.control_dependencies(values):
                    tf.raw_ops.QueueEnqueueManyV2(
                        handle=queue, components=[tf.zeros([readers], tf.int32)]
                    )

    def trace_fetch(self, generation: int) -> CountedFunction:
        """A function of a worker that brings each copy once it may be read."""

        def fetch() -> None:
            for number, group in enumerate(self._groups):
                self._fetch(group, self._queue(number, generation))

        return counted(self._context.strategy, fetch)

    def _fetch(self, group: list[_Part], queue: tf.Tensor) -> None:
        with tf.device(group[0].variable.device):
            token = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int32])
        variables = [part.variable for part in group]
        compressors = [part.read.compressor for part in group]
        keys = [pulls.key_of(part.read.variable, part.read.compressor) for part in group]
        with ops.control_dependencies([token[0].op]):
            values = pulls.read_together(variables, compressors, keys)
        for part, value in zip(group, values):
            self._copy(part).assign(value)

    def _queue(self, number: int, generation: int) -> tf.Tensor:
        """Queue on a group's server, with a token for each worker yet to read it."""
        with tf.device(self._groups[number][0].variable.device):
            return tf.raw_ops.FIFOQueueV2(
                component_types=[tf.int32],
                shapes=[[]],
                shared_name=f"{self._states.prefix}/updated/{generation}/{number}",
            )


class Undo:
    """Keeps the values of variables until the next update, on their parameter servers.

    A value and what is kept of it share their memory until an update writes to the variable: the
    servers have twice the bytes of these variables then.
    """

    def __init__(
        self,
        parts: Sequence[tf.Variable],
        prefix: str,
        on_chief: Callable[[Callable[[], Any]], Callable[[], Any]],
    ) -> None:
        self.handles = {id(part.handle) for part in parts}
        self._parts, self._prefix = parts, prefix
        self.keep, self.restore = on_chief(self._keep), on_chief(self._restore)

    def _keep(self) -> None:
        for part in self._parts:
            with tf.device(part.device):
                tf.raw_ops.AssignVariableOp(resource=self._kept(part), value=pulls.raw_read(part))

    def _restore(self) -> None:
        for part in self._parts:
            with tf.device(part.device):
                value = tf.raw_ops.ReadVariableOp(resource=self._kept(part), dtype=part.dtype)
                tf.raw_ops.AssignVariableOp(resource=part.handle, value=value)

    def _kept(self, part: tf.Variable) -> tf.Tensor:
        name = f"{self._prefix}/before/{part._unique_id}"
        return tf.raw_ops.VarHandleOp(shape=part.shape, dtype=part.dtype, shared_name=name)


class Overlap(NamedTuple):
    """Functions that a step has besides, if it overlaps with the next one.

    `undo` is of what the update writes; `release` lets an update end whose gradients will not come;
    `fetch` brings a worker's copies when they may be read.
    """

    undo: Undo
    release: Callable[..., Any]
    fetch: CountedFunction


class HandedOver(NamedTuple):
    """Gradients on a worker, or `GradientSum`s on servers, that an optimizer is to apply."""

    optimizer: keras.optimizers.Optimizer
    gradients: list[Any]
    variables: list[keras.Variable]


class SyncFunction(NamedTuple):
    """The functions of a step for batches of one form.

    `push` sends what the worker's part keeps back, if that does not send gradients itself. `apply`,
    of an attempt's stamp, the number of gradients, a factor and the number of workers that fetch,
    lets the optimizers apply the sums. `sums` has the chief compute what a share adds to sums over
    the batch, if the step needs any.
    """

    step: TracedStep
    push: CountedFunction | None
    added: list[HandedOver]
    apply: Callable[..., Any]
    sums: BatchSums | None = None
    overlap: Overlap | None = None


class OverlapPlanner:
    """Makes steps overlap: their functions that read copies, and update early."""

    def __init__(self, context: StepContext, on_chief: Callable[..., Any]) -> None:
        self._context, self._on_chief = context, on_chief
        # By graph: what the function that is traced has read of its copies.
        self._read = weakref.WeakKeyDictionary[tf.Graph, list[tf.Operation]]()
        self._copies: WorkerCopies | None = None

    def begin(self, pulls: Pulls) -> None:
        assert self._copies is not None
        self._copies.keep_in(pulls)
        graph = ops.get_default_graph()
        self._read[graph] = [op for op in graph.get_operations() if op.type == "ReadVariableOp"]

    def before_adding(self) -> Callable[[tf.Variable], list[tf.Operation]]:
        """Reads that must precede the adding of a gradient, for `aggregation.add`."""
        graph = ops.get_default_graph()
        if graph not in self._read:
            return lambda target: []
        with ops.control_dependencies(self._read[graph]), ops.device(None):
            is_read = tf.no_op()
        # One message to each server instead of one for each variable.
        of_servers: dict[str, tf.Operation] = {}
        gathers: dict[int, list[tf.Operation]] = {}
        for op, handle in uses(graph):
            if op.type in GATHERS:
                gathers.setdefault(id(handle), []).append(op)

        def before(target: tf.Variable) -> list[tf.Operation]:
            if target.device not in of_servers:
                with ops.device(target.device), ops.control_dependencies([is_read]):
                    of_servers[target.device] = tf.no_op()
            return [of_servers[target.device], *gathers.get(id(target.handle), ())]

        return before

    def make(
        self,
        function: SyncFunction,
        apply: Callable[..., Any],
        generation: int,
        trace: Callable[[], TracedStep],
    ) -> SyncFunction | None:
        """The functions for a step that has been traced; None if it cannot overlap.

        No other functions share the `generation`. `trace` traces the step once more, with `begin`.
        """
        if any(is_keyed(variable) for one in function.added for variable in one.variables):
            _warn_of("its update of a dynamic table cannot be undone")
            return None
        prefix = self._context.extended.worker_states.prefix
        undo = Undo(_updated_by(function.added), prefix, self._on_chief)
        written = undo.handles
        whole = [
            read
            for read in function.step.whole_reads
            if any(id(part.handle) in written for part in read.parts)
        ]
        self._copies = copies = WorkerCopies(self._context, whole)
        on_copies = trace()
        problem = _problem(function.step, on_copies, written)

        def update(*args: tf.Tensor) -> None:
            apply(*args)
            copies.announce(args[-1], generation)

        updating = self._on_chief(update, *aggregation.UPDATE_SPECS)
        graph = updating.concrete.graph
        writes = written_by(graph.get_operations(), graph) - written
        others = [handle for handle, _ in graph.captures if id(handle) in writes]
        if others and not problem:
            problem = f"its update writes to {others[0]!r}"
        if problem:
            _warn_of(problem)
            return None

        specs = aggregation.STAMP, aggregation.COUNT
        release = _of_all(self._on_chief, function.added, GradientSum.release, *specs)
        overlap = Overlap(undo, release, copies.trace_fetch(generation))
        return function._replace(step=on_copies, apply=updating, overlap=overlap)


def _of_all(
    on_chief: Callable[..., Any],
    added: Iterable[HandedOver],
    method: Callable[..., None],
    *specs: tf.TensorSpec,
) -> Callable[..., Any]:
    """A call of the chief that calls a method of all sums of a step."""

    def run(*args: tf.Tensor) -> None:
        for of_optimizer in added:
            for one in aggregation.each(of_optimizer.gradients):
                method(one, *args)

    return on_chief(run, *specs)


def _warn_of(problem: str) -> None:
    logger.warning(
        "steps do not overlap, as %s; training goes on without. Received: overlap_steps=True",
        problem,
    )


def _problem(step: TracedStep, on_copies: TracedStep, written: Container[int]) -> str | None:
    """Reason why a function cannot read its copies, a clause; None if it can."""
    if not are_same(step.variables, on_copies.variables):
        return "it does not take the same way each time that it is traced"
    assert on_copies.replica_step is not None
    late = on_copies.replica_step.first_hand_over
    graph = on_copies.concrete.graph
    order = {op: i for i, op in enumerate(graph.get_operations())}
    for op, handle in uses(graph):
        if id(handle) in written and (op.type not in GATHERS or late is None or order[op] > late):
            return (
                f"it reads a variable by {op.type} ({op.name}) that is updated meanwhile: in a "
                "branch, a loop or a tf.function of its own, or after the optimizer's turn"
            )
    return None


def _updated_by(added: Iterable[Any]) -> list[tf.Variable]:
    found = {}
    for optimizer, _, variables in added:
        of_optimizers = [*optimizer.variables, *unwrapped(optimizer).variables]
        for variable in [*variables, *of_optimizers]:
            for part in parts_of(variable._value):
                if is_on_ps(part):
                    found[id(part)] = part
    return list(found.values())


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
                self._discards[key] = _of_all(
                    self._on_chief, function.added, GradientSum.discard, aggregation.STAMP
                )
            if key in self._discards:
                self._discards[key](stamp)

    def _replica_step(self, initial: tf.Tensor) -> WorkerReplicaStep:
        stamp = tf.cast(initial[-1], tf.int64)
        push = HandedOver if self._pushes_later else lambda *args: self._add(stamp, *args)
        # Their number is known when all is traced: the last sum is the first.
        return WorkerReplicaStep(self._context.engine, initial[-2], initial[-3::-1], push)

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
            sent = self._compressed_by(aggregation.over, optimizer, gradients, values)
            pairs = self._context.push(inner, sent, values)
            sums = aggregation.add(pairs, stamp, prefix, after, joins)
        return HandedOver(optimizer, sums, [by_value[id(value)] for _, value in pairs])

    def _compressed_by(
        self,
        change: Callable[[Gradient | None, tf.Tensor | None], Gradient | None],
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Gradient | None],
        variables: Sequence[tf.Variable],
    ) -> list[Gradient | None]:
        """Gradients, of which those that are compressed are changed by the loss scale."""
        compressor_of = self._context.extended.compressors.of_gradient
        # Gradients in float16 need their scale, by which they are not too small.
        are = [compressor_of(v) is not None and v.dtype != tf.float16 for v in variables]
        scale = loss_scale(optimizer) if any(are) else None
        return [change(g, scale) if its else g for its, g in zip(are, gradients)]

    def _make(self, step: TracedStep) -> SyncFunction:
        assert step.replica_step is not None
        push, added = None, step.replica_step.handed_over
        if self._pushes_later:
            push, added = self._make_push(step)

        apply = self._on_chief(lambda *args: self._apply(added, *args), *aggregation.UPDATE_SPECS)
        return SyncFunction(step, push, added, apply, _sums_of(step))

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
        self,
        added: list[HandedOver],
        stamp: tf.Tensor,
        count: tf.Tensor,
        scale: tf.Tensor,
        readers: tf.Tensor,
    ) -> None:
        for optimizer, sums, variables in added:
            gradients = aggregation.take(sums, stamp, count, scale)
            if _needs_whole(optimizer):
                gradients = [_joined(g, v._value) for g, v in zip(gradients, variables)]
            values = [variable._value for variable in variables]
            gradients = self._compressed_by(aggregation.times, optimizer, gradients, values)
            with worker_function.applying_sums_flag.raised():
                if variables:
                    optimizer.apply(gradients, variables)
                else:
                    optimizer.iterations.assign_add(1)

    def _on_chief(self, function: Callable[..., Any], *specs: tf.TensorSpec) -> Any:
        def in_replica(*args: tf.Tensor) -> Any:
            with tf.device(worker_function.CHIEF):
                self._context.strategy.run(function, args)
                return tf.constant(True)

        origin = tf.function(in_replica, autograph=False)
        with self._context.strategy.scope():
            concrete = origin.get_concrete_function(*specs)

        def call(*args: Any) -> Any:
            with tf.device(worker_function.CHIEF):
                given = (scalar_tensor(a, spec.dtype) for a, spec in zip(args, specs))
                return worker_function.call(concrete, *given)

        vars(call).update(concrete=concrete, origin=origin)
        return call


def _sums_of(step: TracedStep) -> BatchSums | None:
    replica_step, concrete = step.replica_step, step.concrete
    if replica_step is None or not replica_step.asked:
        return None
    _, specs = concrete.structured_input_signature[0]
    given = concrete.inputs[1 : len(concrete.inputs) - len(concrete.captured_inputs)]
    return BatchSums(replica_step, given, specs)


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
