"""`schedule="pipedream"`: two batches are under way at the same time.

The gradients of a batch are those by the weights from before the last update, on all stages alike:

    weights[t + 1] = update(weights[t], gradients(batch[t], weights[t - 1]))

So the gradients of batch `t + 1` can be computed while those of batch `t` still are, and no stage
waits for the end of a batch. This is PipeDream-2BW. PipeDream itself updates after each
micro-batch, by gradients of weights that are `stages - 1 - k` updates old on stage `k`, and keeps
as many versions of them.

Reference: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021;
"PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus.core.base import threads
from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.pipeline import microbatches, schedule, traffic
from keras_psplus.pipeline.boundary import READS
from keras_psplus.pipeline.stages import host_of, making_on
from keras_psplus.pipeline.step_function import Feed, Functions, is_ahead, on_device
from keras_psplus.pipeline.traced_step import PipelineStep, Update
from keras_psplus.tf_internals import framework_ops as ops

if TYPE_CHECKING:
    from keras_psplus.core.distributed_engine import DistributedEngine
    from keras_psplus.pipeline.context import PipelineContext


# The order of two calls of a step's function that run at the same time.
#
# Each call runs the operations on a stage's state (averages of BatchNormalization, seeds, metrics)
# after those of the call before. TensorFlow orders operations inside of a call only.


_CHANGES = ("Assign", "ResourceScatter", "ResourceApply", "ResourceSparseApply")


def state_operations(graph: tf.Graph, weights: Collection[int]) -> dict[str, list[tf.Operation]]:
    """Operations on variables that a graph changes, without weights, by device."""
    found: dict[str, list[tf.Operation]] = {}
    for outside, inside in graph.captures:
        if inside.dtype != tf.resource or id(outside) in weights:
            continue
        users = inside.consumers()
        if any(op.type not in READS for op in users):
            for op in users:
                found.setdefault(op.device, []).append(op)
    return found


def changed_weights(graph: tf.Graph, weights: Collection[int]) -> list[int]:
    return [
        id(outside)
        for outside, inside in graph.captures
        if id(outside) in weights and any(op.type.startswith(_CHANGES) for op in inside.consumers())
    ]


class Tokens:
    """A token for each device, which goes from call to call.

    A call takes it before its first operation on the device's state and hands it on after the last,
    through two queues in turn, so that the call after the next cannot be the first to take it.
    """

    def __init__(self) -> None:
        # By devices: the ids of the handles that graphs have captured, and the queues in use.
        self._captured: dict[str, tuple[int, ...]] = {}
        self._queues: dict[str, tuple[tf.queue.FIFOQueue, tf.queue.FIFOQueue]] = {}
        # Graphs know them by their handles.
        self._first_queues: list[tuple[tf.queue.FIFOQueue, tf.queue.FIFOQueue]] = []

    def chain(self, operations: dict[str, list[tf.Operation]]) -> None:
        """Orders operations of a graph being traced after those of the previous call."""
        for device, of_device in operations.items():
            if device not in self._captured:
                self._first_queues.append(_make_queues(device))
                self._queues[device] = self._first_queues[-1]
                self._captured[device] = tuple(id(q.queue_ref) for q in self._queues[device])
            taken_from, given_to = self._first_queues[list(self._captured).index(device)]
            with ops.device(host_of(device)), ops.control_dependencies(None):
                token = taken_from.dequeue()
                for op in of_device:
                    op._add_control_input(token.op)
                with ops.control_dependencies(of_device):
                    given_to.enqueue(token)

    def handles(self, turn: int) -> dict[int, tf.Tensor]:
        """Queues of a call, numbered from 0, by the captured handles that they replace."""
        return {
            handle: self._queues[device][(i + turn) % 2].queue_ref
            for device, handles in self._captured.items()
            for i, handle in enumerate(handles)
        }

    def reset(self) -> None:
        """Gives the tokens to the next call, number 0; calls that wait for one fail."""
        for device, pair in self._queues.items():
            for queue in pair:
                queue.close(cancel_pending_enqueues=True)
            self._queues[device] = _make_queues(device)


def _make_queues(device: str) -> tuple[tf.queue.FIFOQueue, tf.queue.FIFOQueue]:
    with tf.init_scope(), tf.device(host_of(device)):
        pair = tuple(tf.queue.FIFOQueue(1, [tf.int32], [[]]) for _ in range(2))
        pair[0].enqueue(0)
    return pair


def keep_results_where_they_are(graph: tf.Graph) -> None:
    """Has operations that TensorFlow adds for results run where their inputs are."""

    def device_of_inputs(op: tf.Operation) -> str:
        return op.device or next((tensor.device for tensor in op.inputs if tensor.device), "")

    graph._add_device_to_stack(device_of_inputs)


# Batches that are under way at the same time.
_DEPTH = 2
# Seconds that batches may take to end that began after one that has failed.
_SECONDS_TO_END = 10


class _WeightVersions:
    """Copies of weights on their devices, for two batches in flight.

    TensorFlow shares a copy's memory with its variable until that is changed: dense weights have
    two versions in memory, not three.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable]
    ) -> None:
        self.variables = list(variables)
        self._copies: list[list[tf.Variable]] = [[], []]
        for variable in self.variables:
            for copies in self._copies:
                device = variable._value.device
                # In the strategy's scope, variables are on the last stage by default.
                with tf.init_scope(), making_on(strategy, device), tf.device(device):
                    copies.append(tf.Variable(variable._value.read_value(), trainable=False))

    def are_of(self, variables: Sequence[keras.Variable]) -> bool:
        handles = [id(variable._value.handle) for variable in variables]
        return handles == [id(variable._value.handle) for variable in self.variables]

    def handles(self, turn: int) -> dict[int, tf.Tensor]:
        """Copies of variables for a call, by ids of the handles that they replace."""
        copies = self._copies[turn % 2]
        return {id(v._value.handle): copy.handle for v, copy in zip(self.variables, copies)}

    def assign(self, turn: int) -> None:
        for variable, copy in zip(self.variables, self._copies[turn % 2]):
            with tf.device(variable._value.device):
                copy.assign(variable._value.read_value())


class _Gradients(Functions):
    """A train step whose gradients are results, in the place of the last `update`."""

    _counts = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.update: Update | None = None
        self.tokens = Tokens()

    def _run_in_step(self, step: PipelineStep, batch: Any) -> tuple[Any, list[Any]]:
        step.updates = []
        logs = super()._run_in_step(step, batch)
        if len(step.updates) > 1:
            raise ValueError(
                'With `schedule="pipedream"`, a train step updates weights once, when the next '
                'batch has begun. Pass `schedule="gpipe"` to the strategy. Received: '
                f"{len(step.updates)} updates in one train step"
            )
        self.update = step.updates[0] if step.updates else None
        return logs, self.update.grads if self.update else []

    def _end_trace(self, graph: tf.Graph) -> None:
        variables = self.update.variables if self.update else ()
        weights = {id(v._value.handle): v.path for v in variables}
        changed = changed_weights(graph, weights)
        if changed:
            raise ValueError(
                'With `schedule="pipedream"`, trainable weights are changed by their optimizer '
                'alone. Pass `schedule="gpipe"` to the strategy. Received: a train step that '
                f"assigns {', '.join(weights[one] for one in changed)}"
            )
        self.tokens.chain(state_operations(graph, weights))
        keep_results_where_they_are(graph)


class PipeDreamFunction:
    """Train function of `fit`, which starts a step and finishes the one before the last."""

    def __init__(
        self, engine: DistributedEngine, context: PipelineContext, model: keras.Model, divides: bool
    ) -> None:
        self._engine, self._context = engine, context
        self._model, self._progress = model, engine.strategy.progress
        function = microbatches.step_of(model) if divides else model.train_step
        order = schedule.one_f_one_b if divides else None
        self._gradients = _Gradients(engine, context, model, function, order)
        self._feed = Feed(self._gradients.send)
        self._versions: _WeightVersions | None = None
        self._apply: list[Callable[..., Any]] = []
        self._begun = 0
        self._under_way: collections.deque[tuple[int, concurrent.futures.Future[Any]]]
        self._under_way = collections.deque()
        self._logs: Any = None

    def __call__(self, iterator: Any) -> Any:
        steps = 0
        self._progress.begin("training step")
        try:
            batches = self._feed.batches(iterator, self._model.steps_per_execution)
            for batch, shows_rows in self._context.times.timed(batches):
                self._begin(batch, shows_rows)
                steps += 1
        finally:
            self._progress.end()
        if not steps:
            raise StopIteration
        if not is_ahead(iterator):
            self.finish()
        self._progress.count(steps)
        return self._logs

    def finish(self) -> Any:
        self._progress.begin("training step")
        try:
            while self._under_way:
                self._end_oldest()
        finally:
            self._progress.end()
        self._context.under_way = None
        if self._begun:
            self._begun = 0
            self._gradients.tokens.reset()
        return self._logs

    def has(self, variable: keras.Variable) -> bool:
        """Whether a variable is of the model, its metrics or its optimizers."""
        owners = (self._model, *self._model.metrics, *optimizers_of(self._model).values())
        return any(variable is one for owner in owners for one in owner.variables)

    def _begin(self, batch: Any, shows_rows: bool) -> None:
        if len(self._under_way) == _DEPTH:
            self._end_oldest()
        function, batch = self._gradients.of(
            batch, shows_rows, lambda one, given: (one.get_concrete_function(given), given)
        )
        turn = self._begun
        if turn == 0:
            # The script may have changed weights.
            self._take_versions()
            self._context.has_written = True
            self._context.finish_writes()
        replaced = self._gradients.tokens.handles(turn)
        if self._versions is not None:
            replaced.update(self._versions.handles(turn))
        captured = [replaced.get(id(one), one) for one in function.captured_inputs]
        leaves = tf.nest.flatten(batch, expand_composites=True)
        tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
        # There is no public way to call a graph with other variables than it was traced with.
        call = threads.start(
            functools.partial(function._call_flat, tensors, captured), "pipeline step"
        )
        self._under_way.append((turn, call))
        self._context.under_way = self
        self._begun += 1
        if turn == 0:
            # There are no logs yet, and Keras wants some.
            self._logs, _ = self._results_of(call)

    def _end_oldest(self) -> None:
        turn, call = self._under_way.popleft()
        self._logs, grads = self._results_of(call)
        if self._versions is not None:
            self._apply[turn % _DEPTH](grads)

    def _results_of(self, call: concurrent.futures.Future[Any]) -> Any:
        try:
            results, moments = call.result()
        except BaseException:
            # The next one would wait for the token of this one.
            self._gradients.tokens.reset()
            concurrent.futures.wait([one for _, one in self._under_way], _SECONDS_TO_END)
            self._under_way.clear()
            self._begun, self._context.under_way = 0, None
            raise
        self._context.times.note_moments(moments)
        return results

    def _take_versions(self) -> None:
        update = self._gradients.update
        if update is None:
            self._versions = None
        elif self._versions is None or not self._versions.are_of(update.variables):
            self._versions = versions = _WeightVersions(self._engine.strategy, update.variables)
            self._apply = [
                tf.function(
                    functools.partial(self._update, update, versions, turn),
                    autograph=False,
                    reduce_retracing=True,
                )
                for turn in range(_DEPTH)
            ]
        else:
            for turn in range(_DEPTH):
                self._versions.assign(turn)

    def _update(
        self, update: Update, versions: _WeightVersions, turn: int, grads: Sequence[Any]
    ) -> None:
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        grads = [on_device(v._value.device, one) for v, one in zip(update.variables, grads)]
        with PipelineStep(self._engine, self._context, 1):
            self._engine.strategy.run(update.optimizer.apply, args=(grads, update.variables))
        versions.assign(turn)
        traffic.place(graph, before, self._context.stages)
