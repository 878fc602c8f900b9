"""One step of a pipeline while it is traced: micro-batches, stages, and their order."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus.core.batch import losses
from keras_psplus.core.batch.replica_step import ReplicaStep
from keras_psplus.core.graph import compiled_calls, subgraph
from keras_psplus.core.graph.compiled_calls import CompiledFunction
from keras_psplus.engine import Call
from keras_psplus.keras_internals.keras_parts import global_state, tree
from keras_psplus.pipeline import boundary, microbatches, schedule
from keras_psplus.pipeline.boundary import BackwardOperations, JoinedCalls, StageReplay
from keras_psplus.pipeline.context import Segment, StageClock
from keras_psplus.pipeline.replicas import Copied, PipelineSums, Reads
from keras_psplus.pipeline.stages import Stages

if TYPE_CHECKING:
    from keras_psplus.core.distributed_engine import DistributedEngine
    from keras_psplus.pipeline.context import PipelineContext


# A stage's forward and backward pass of a micro-batch, compiled by XLA.
#
#     stage 0: [ layers 1, 2, 3 ] ─► activations ─► stage 1: [ layers 4, 5 ] ─► loss
#              compiled                                      compiled
#
# Each function has a gradient, which is compiled too. All micro-batches of a pipeline use the same
# functions, so that there are as many compilations as stages. What crosses stages, and the
# optimizer's update, stay outside.


class _CutAgain(Exception):
    """Layers of a segment were found that XLA cannot compile."""


def compiled_on_stage(
    calls: compiled_calls.CompiledCalls,
    device: str,
    function: Callable[..., Any],
    layers: list[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    key: Any,
) -> CompiledFunction | None:
    """Makes a compiled function of calls on a stage that share a `key`."""
    if calls.is_tracing or not compiled_calls.have_weights(layers):
        return None
    with tf.device(device):
        found = calls.function(function, layers, args, kwargs, (key, _training()), device)
    if found is None and len(layers) > 1 and not all(map(calls.is_compiled, layers)):
        raise _CutAgain
    return found


def run_graph(
    calls: compiled_calls.CompiledCalls,
    call: Call,
    stages: Stages,
    call_on_stage: Callable[..., Any],
) -> Any:
    """Runs the layers of a functional model, those of a stage in one call."""
    run = call.get("operation_fn")

    def kind_of(operation: Any) -> Any:
        layers = operation._flatten_layers() if isinstance(operation, keras.Layer) else []
        stage = stages.of(operation) if isinstance(operation, keras.Layer) else None
        if stage is None and any(stages.of(layer) is not None for layer in layers):
            return None
        if not calls.is_compiled(operation):
            return None
        return subgraph.INHERITED if stage is None else stage

    def run_one(segment: subgraph.Segment, found: dict[int, Any]) -> bool:
        plain = functools.partial(compiled_calls.run_segment, segment, run)
        if segment.kind is None or not compiled_calls.have_weights(segment.operations):
            segment.run(found, plain)
            return True

        def on_stage(given: list[tf.Tensor]) -> Any:
            key = "segment", id(segment)
            return call_on_stage(segment.kind, plain, segment.operations, (given,), {}, key)

        try:
            segment.run(found, on_stage)
        except _CutAgain:
            return False
        return True

    return calls.run_segments(call, kind_of, run_one)


def _training() -> str:
    context = global_state.get_global_attribute("current_call_ctx")
    return repr({k: v for k, v in vars(context).items() if k != "entry_layer"}) if context else ""


class Microbatch:
    """Context in which layers are called for one micro-batch.

    It goes through a pipeline, whose copies of weights are read, as the `turn`-th; `sums` counts
    the sums over micro-batches that it has asked for.
    """

    def __init__(
        self,
        step: PipelineStep,
        number: int,
        first: int,
        end: int,
        fraction: float,
        reads: list[Reads],
    ) -> None:
        self._step = step
        self.number, self.first, self.end, self.fraction = number, first, end, fraction
        self.turn, self.pipeline = divmod(number, len(reads))
        self.reads = reads[self.pipeline]
        self.sums = 0

    def __enter__(self) -> Microbatch:
        self.reads.__enter__()
        self._step.part = self
        return self

    def __exit__(self, *exc: Any) -> None:
        self._step.part = None
        self.reads.__exit__(*exc)


class StageAction:
    """Context of a stage's action on one micro-batch, after its previous action.

    Without that order, a stage with one thread would do a part of every micro-batch before it sends
    the first of them. Operations wait for those that were traced before, so there can be no cycle.
    """

    def __init__(self, step: PipelineStep, stage: int, part: Microbatch, direction: str) -> None:
        self._step, self._reads, self._action = step, part.reads, (direction, part.turn)
        self._worker = part.pipeline * len(step.stages.devices) + stage
        self._of_inputs: list[tf.Tensor] = []
        self._segment: Segment | None = None

    def begins_with(self, given: Any) -> None:
        if self._step.clock is not None:
            self._segment = self._step.clock.begin(self._worker, self._action, given)

    def __enter__(self) -> StageAction:
        self._context = contextlib.ExitStack()
        if self._action[0] == schedule.BACKWARD:
            self._graph = tf.compat.v1.get_default_graph()
            self._first = len(self._graph.get_operations())
        # A layer that computes itself again for its gradients reads its weights again.
        self._context.enter_context(self._reads)
        self._context.enter_context(tf.control_dependencies(list(self._tensors_before())))
        return self

    def __exit__(self, *exc: Any) -> Any:
        if self._action[0] == schedule.BACKWARD:
            made = self._graph.get_operations()[self._first :]
            self._step.note_backward(self._worker, self._action[1], made, self._of_inputs)
        return self._context.__exit__(*exc)

    def _tensors_before(self) -> Iterator[tf.Tensor]:
        traced, done = self._step.traced[self._worker], self._step.done[self._worker]
        direction = self._action[0]
        last = next((one for one in reversed(traced) if one[0] == direction), None)
        if last == self._action:
            return  # A later layer of the same turn.
        traced.append(self._action)
        if direction == schedule.BACKWARD:
            return
        wanted = {last, *self._step.before[self._worker].get(self._action, ())} - {None}
        if self._segment is not None:
            self._segment.after |= wanted
        for action in sorted(wanted):
            yield from done.get(action, ())

    def ends_with(self, tensors: list[tf.Tensor], activations: list[tf.Tensor]) -> None:
        """Notes what is computed last, and what other stages may need."""
        is_forward = self._action[0] == schedule.FORWARD
        (self._step.activations if is_forward else self._step.gradients).extend(activations)
        self._of_inputs = activations
        if self._segment is not None and self._step.clock is not None:
            self._step.clock.end(self._segment, self._worker, tensors, activations)
        if tensors:
            self._step.done[self._worker][self._action] = list(tensors)


@dataclasses.dataclass
class Update:
    """Update that a train step requests from an optimizer; some gradients may be None."""

    optimizer: keras.optimizers.Optimizer
    grads: list[tf.Tensor | tf.IndexedSlices | None]
    variables: list[keras.Variable]


class PipelineStep(ReplicaStep):
    """Context of tracing one step.

    The outermost layer that the step calls, the model as a rule, is called once for each
    micro-batch, and gets its outputs joined. Inside, each layer that is on a stage runs on that
    stage's device. What is between layers is left to `traffic.place`.

    `rows` are those of the batch, where tensors do not tell. By `order`, a micro-batch waits for
    the gradients of earlier ones. `activations` has what layers have returned, `gradients` those
    by what they were called with; `updates` what the step asks of optimizers, if for later;
    `traced` each worker's actions, in the order of the trace.
    """

    can_sum = True

    def __init__(
        self,
        engine: DistributedEngine,
        context: PipelineContext,
        count: int,
        rows: int | None = None,
        order: Callable[[int, int], list[schedule.Actions]] | None = None,
        trains: bool = False,
    ) -> None:
        super().__init__(engine)
        self._count, self._order, self.rows = count, order, rows
        self.stages, devices = context.stages, context.stages.all_devices
        self.over_pipelines = PipelineSums(context.copies, trains)
        self.part: Microbatch | None = None
        self.clock: StageClock | None = None
        self._is_on_stage, self._recompute = False, trains and engine.strategy.recompute
        # By stage and micro-batch, and that of the layer that is called just now.
        self._replays: dict[tuple[int, int], StageReplay] = {}
        self._replay: StageReplay | None = None
        self._of_batch: dict[int, Any] = {}
        self._parts: dict[int, tuple[Any, list[tf.Tensor]]] = {}  # By ids, as above.
        self.activations: list[tf.Tensor] = []
        self.gradients: list[tf.Tensor] = []
        self.updates: list[Update] | None = None
        self.traced: list[schedule.Actions] = [[] for _ in devices]
        # The last tensors of each action, and what it has to wait for, by worker.
        self.done: list[dict[tuple[str, int], list[tf.Tensor]]] = [{} for _ in devices]
        self.before: list[dict[tuple[str, int], list[tuple[str, int]]]] = [{} for _ in devices]
        # By worker and micro-batch; those of a branch or a loop are left out.
        self._backward: dict[tuple[int, int], BackwardOperations]
        self._backward = collections.defaultdict(BackwardOperations)
        self._graph = tf.compat.v1.get_default_graph()
        # Pairs of a stand-in and one micro-batch's part, for each sum over micro-batches.
        self._sums: list[list[tuple[tf.Tensor, tf.Tensor]]] = []

    @property
    def has_batch_fraction(self) -> bool:
        return self.part is not None

    def batch_fraction(self) -> Any:
        assert self.part is not None
        return self.part.fraction

    def unscale_by_batch_fraction(self, value: tf.Tensor) -> tf.Tensor:
        return value / tf.cast(self.batch_fraction(), value.dtype)

    def sum_over_replicas(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors over the micro-batches, the later of which are yet to be traced."""
        assert self.part is not None
        stand_ins = []
        for tensor in tensors:
            stand_ins.append(tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape))
            if self.part.sums == len(self._sums):
                self._sums.append([])
            self._sums[self.part.sums].append((stand_ins[-1], tensor))
            self.part.sums += 1
        return stand_ins

    def finish_sums(self) -> None:
        """Puts sums in the place of their stand-ins, when all micro-batches are traced."""
        for pairs in self._sums:
            total = tf.add_n([part for _, part in pairs])
            for stand_in, _ in pairs:
                stand_in.op._update_input(0, total)
        self._sums.clear()

    def microbatches(self, rows: int | None, layer: keras.Layer) -> list[Microbatch]:
        """The micro-batches of a batch, contexts in which layers run; one of unknown rows."""
        pipelines, stages = self.stages.pipelines, len(self.stages.devices)
        bounds = microbatches.bounds(rows or 1, self._count * pipelines)
        if self._order is not None:
            counts = [len(range(i, len(bounds), pipelines)) for i in range(pipelines)]
            actions = [of_stage for count in counts for of_stage in self._order(stages, count)]
            self.before = [schedule.before(of_stage) for of_stage in actions]
        reads = self.over_pipelines.reads(layer)
        return [
            Microbatch(self, number, first, end, (end - first) / (rows or 1), reads)
            for number, (first, end) in enumerate(bounds)
        ]

    def note_backward(
        self, worker: int, turn: int, made: list[tf.Operation], of_inputs: list[tf.Tensor]
    ) -> None:
        if tf.compat.v1.get_default_graph() is self._graph:
            self._backward[worker, turn].note(made, of_inputs)

    def finish_backward(self) -> None:
        """Puts gradients by weights after those by inputs, when all is traced.

        Not where a stage has the gradients of all micro-batches to compute at once, as the last one
        has under GPipe: it would do the first part of all of them before any second one.
        """
        if self._order is not None:
            boundary.delay(self._backward.values())
        self._backward.clear()

    def note_changed(self, copied: Copied) -> None:
        self.over_pipelines.note_changed(copied, in_microbatch=self.part is not None)

    def note_parts(self, leaf: tf.Tensor, parts: list[tf.Tensor]) -> None:
        """Notes the micro-batches of a part of the batch, which have come by themselves."""
        self._parts[id(leaf)] = leaf, parts

    def note_of_batch(self, structure: Any) -> None:
        """Marks tensors that have the batch's rows, unknown to TensorFlow."""
        self._of_batch.update((id(leaf), leaf) for leaf in tree.flatten(structure))

    def rows_of(self, structure: Any) -> int | None:
        """Number of rows of a structure's first tensor; None if it is unknown."""
        leaf = next((leaf for leaf in tree.flatten(structure) if microbatches.has_rows(leaf)), None)
        return None if leaf is None else self._rows_of_leaf(leaf)

    def _rows_of_leaf(self, leaf: Any) -> int | None:
        return self.rows if id(leaf) in self._of_batch else leaf.shape[0]

    def take(self, structure: Any, rows: int | None, part: Microbatch) -> Any:
        """Slices a micro-batch from a structure; all of it if the rows are unknown."""
        if rows is None:
            return structure
        parts = {
            key: boundary.as_rows_of(leaf, own[part.number], part.first, rows - part.end)
            for key, (leaf, own) in self._parts.items()
            if own[part.number].shape[0] == part.end - part.first
        }
        return microbatches.take(structure, rows, part.first, part.end, self._rows_of_leaf, parts)

    def as_the_batch(self, leaf: Any) -> Any:
        """A tensor whose number of rows is known if that of the batch is."""
        return leaf if self.rows is None else microbatches.with_unknown_rows(leaf)

    def join(self, name: str, outputs: list[Any], sizes: list[int]) -> Any:
        joined = microbatches.join(name, outputs, sizes)
        if self.rows is not None and sum(sizes) == self.rows:
            joined = tree.map_structure(microbatches.with_unknown_rows, joined)
            self.note_of_batch(joined)
        return joined

    def call(
        self,
        original: Callable[..., Any],
        layer: keras.Layer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self.part is None:
            return self._in_microbatches(original, layer, (args, kwargs))
        stage = None if self._is_on_stage else self.stages.of(layer)
        if stage is None:
            return losses.call_layer(original, layer, *args, **kwargs)
        inside = functools.partial(losses.call_layer, original, layer)
        return self.call_on_stage(stage, inside, [layer], args, kwargs, id(layer))

    def call_on_stage(
        self,
        stage: int,
        function: Callable[..., Any],
        layers: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: Any,
    ) -> Any:
        """Calls layers of one stage, for the micro-batch that is traced."""

        def on_stage(*args: Any, **kwargs: Any) -> Any:
            self._is_on_stage = True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_on_stage = False

        args, kwargs = tree.map_structure(_in_graph, (args, kwargs))
        assert self.part is not None
        part, device = self.part, self.stages.device(stage, self.part.pipeline)
        call, replay, compiled = on_stage, None, None
        if self._recompute:
            replay = self._replays.setdefault((stage, part.number), StageReplay())
            call = functools.partial(self._call_to_repeat, replay, layers[0], part, on_stage)
        if self.compiled_calls is not None and self._recompute:
            self.compiled_calls.note("`recompute=True` computes activations again, layer by layer")
        elif self.compiled_calls is not None:
            compiled = compiled_on_stage(
                self.compiled_calls,
                device,
                on_stage,
                layers,
                args,
                kwargs,
                (key, stage, part.pipeline, part.fraction),
            )
        return boundary.call(
            device,
            call,
            args,
            kwargs,
            StageAction(self, stage, part, schedule.FORWARD),
            lambda: StageAction(self, stage, part, schedule.BACKWARD),
            replay,
            compiled,
        )

    def run_graph(self, call: Call) -> Any:
        """Runs a functional model; the layers of a stage as one function, if compiled."""
        compiled = self.compiled_calls
        if compiled is None or self._recompute or self.part is None:
            return call.proceed()
        if self._is_on_stage:
            return compiled.run_graph(call) if compiled.is_tracing else call.proceed()
        return run_graph(compiled, call, self.stages, self.call_on_stage)

    def _call_to_repeat(
        self,
        replay: StageReplay,
        layer: keras.Layer,
        part: Microbatch,
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        def in_microbatch(*args: Any, **kwargs: Any) -> Any:
            outer, self.part, self._replay = self.part, part, replay
            try:
                return function(*args, **kwargs)
            finally:
                self.part, self._replay = outer, None

        return replay.call(layer, in_microbatch, args, kwargs)

    @property
    def is_replaying(self) -> bool:
        return self._replay is not None and self._replay.is_replaying

    def next_seed(self, draw: Callable[[], tf.Tensor]) -> tf.Tensor:
        return draw() if self._replay is None else self._replay.next_seed(draw)

    def _in_microbatches(
        self, original: Callable[..., Any], layer: keras.Layer, given: tuple[Any, Any]
    ) -> Any:
        rows = self.rows_of(given)
        calls, found, sizes = JoinedCalls(self.over_pipelines.of_variables), [], []
        layers = list(layer._flatten_layers())
        for part in self.microbatches(rows, layer):
            own = self.take(given, rows, part)
            with part:
                calls.call(functools.partial(self.call, original, layer, *own), own)
            sizes.append(part.end - part.first)
            # The next call clears them.
            found.append([list(one._losses) for one in layers])
        self.finish_sums()
        if len(sizes) > 1:
            microbatches.join_losses(layers, found, sizes)
        return calls.join(lambda outputs: self.join(layer.name, outputs, sizes), sizes)


def _in_graph(leaf: Any) -> Any:
    """A tensor of the graph; of an eager one, which a model keeps, a copy."""
    is_eager = isinstance(leaf, tf.Tensor) and hasattr(leaf, "numpy")
    return tf.identity(leaf) if is_eager else leaf
