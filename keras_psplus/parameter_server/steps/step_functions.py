"""The functions that workers run, traced once for each form of the batches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.distributed_engine import DistributedEngine
from keras_psplus.core.graph.compiled_calls import CompiledFunction
from keras_psplus.keras_internals.keras_parts import tree
from keras_psplus.parameter_server.tracing.traffic import (
    TrafficCounter,
    TrafficSummary,
    current_counter,
)
from keras_psplus.parameter_server.tracing.worker_function import (
    Batches,
    ClosureVariable,
    JoinedBatches,
    ReadLock,
    Trace,
    can_be_joined,
    current_trace,
    first_of,
    separate,
    spec_of,
)
from keras_psplus.parameter_server.tracing.worker_function import join as join_batches
from keras_psplus.parameter_server.transport.pulls import Pulls, current_pulls

if TYPE_CHECKING:
    from keras_psplus.parameter_server.context import StepContext
    from keras_psplus.parameter_server.sync.replica_step import WorkerReplicaStep
    from keras_psplus.parameter_server.tracing.traffic import CallCosts, TrafficTotals
    from keras_psplus.parameter_server.transport.pulls import WholeRead


# A model's step on a worker: its arguments, and calls compiled by XLA.
#
#     servers ─► values ─► [ model ] ─► loss ─► tape ─► [ gradients ] ─► pushes ─► servers
#                          compiled                      compiled
#
# XLA cannot compile what is on another machine, so that weights are read before, and what the
# layers assign is written after the call. Rows of embeddings are looked up outside.


def tensors(batch: Any) -> Any:
    """A batch as Keras's data adapters yield it, in tensors and without what is missing."""
    while isinstance(batch, tuple) and len(batch) > 1 and batch[-1] is None:
        batch = batch[:-1]

    def convert(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, tf.experimental.Optional):
            return None
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            return leaf
        return tf.convert_to_tensor(leaf)

    return tree.map_structure(convert, batch)


def next_batches(iterator: Iterator[Any], count: int) -> list[Any]:
    """The next batches of an iterator, as `tensors`; fewer at its end."""
    batches: list[Any] = []
    for _ in range(count):
        try:
            batches.append(tensors(next(iterator)))
        except (StopIteration, tf.errors.OutOfRangeError):
            break
    return batches


def spec_of_tensors(element_spec: Any, batch: Any) -> Any:
    """A dataset's element specification in the form of `tensors`, if it describes a batch."""
    if element_spec is None:
        return None
    while isinstance(element_spec, tuple) and len(element_spec) > 1:
        if not isinstance(element_spec[-1], tf.OptionalSpec):
            break
        element_spec = element_spec[:-1]
    try:
        tf.nest.assert_same_structure(element_spec, batch, expand_composites=True)
    except (TypeError, ValueError):
        return None
    return element_spec


def weights(model: keras.Model) -> list[tf.Variable]:
    return [variable._value for variable in model.weights]


def compiled_step(
    engine: DistributedEngine, model: keras.Model, step_function: Callable[..., Any]
) -> Callable[..., Any]:
    """A step function whose calls of models are compiled, if the model is compiled so."""
    calls = engine.compiled_calls(model)
    if calls is None:
        return step_function

    @functools.wraps(step_function)
    def step(*args: Any, **kwargs: Any) -> Any:
        with calls.of_this_thread(engine):
            result = step_function(*args, **kwargs)
        calls.check()
        return result

    return step


class ServedFunction(CompiledFunction):
    """A compiled function whose variables are on servers: it takes and returns their values."""

    def __init__(
        self,
        function: Callable[..., Any],
        layers: Callable[[], Iterable[keras.Layer]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        found = {id(one): one for layer in layers() for one in layer.variables}
        self._read, self._changed = list(found.values()), list[keras.Variable]()
        super().__init__(function, layers, args, kwargs)

    def why_not(self, device: str | None = None) -> str | None:
        if any(tensor.dtype in (tf.resource, tf.variant) for tensor in self.captured):
            return "it reads variables that are not its layers'"
        return super().why_not(device)

    def _inputs(self, flat: list[Any]) -> tuple[Any, ...]:
        return *super()._inputs(flat), [tf.convert_to_tensor(one._value) for one in self._read]

    def _run(self, tensors: Any, masks: Any, values: Any = ()) -> Any:
        pairs = list(zip(self._read, values))
        with keras.StatelessScope(pairs, collect_losses=True) as scope:
            given = [scope.get_current_value(one) for one in self._read]
            outputs, masks, added, _ = super()._run(tensors, masks)
            now = [scope.get_current_value(one) for one in self._read]
        changes = [(one, b) for one, a, b in zip(self._read, given, now) if a is not b]
        self._changed = [one for one, _ in changes]
        if scope.losses:
            self._owners = [*self._owners, (next(iter(self._layers())), len(scope.losses))]
        return outputs, masks, [*added, *scope.losses], [value for _, value in changes]

    def _write(self, changes: list[tf.Tensor]) -> None:
        for variable, value in zip(self._changed, changes):
            variable.assign(value)


class TracedStep(NamedTuple):
    """A worker function for batches of one form.

    Attributes:
        concrete: The concrete function, of the closure variables' values and the batches.
        overwritten: Those of them that are given values instead of being added to.
        tables: Dynamic tables that it keeps gradients for.
        notes: What `collect` noted while the function was traced.
        costs: What a call costs, a `traffic.TrafficSummary`.
        may_overlap: Whether a worker may run it beside another call of it.
        replica_step: What the context of tracing was; None for steps of one worker alone.
        whole_reads: The variables that it reads whole.
        origin: The function that it is traced from; TensorFlow holds it weakly.
    """

    concrete: tf.types.experimental.ConcreteFunction
    variables: list[ClosureVariable]
    overwritten: list[ClosureVariable]
    tables: list[Any]
    notes: Any
    costs: TrafficSummary
    may_overlap: bool
    replica_step: WorkerReplicaStep | None
    whole_reads: list[WholeRead]
    origin: Any

    def split(self, vector: np.ndarray | tf.Tensor) -> tuple[np.ndarray, int, np.ndarray]:
        """Splits a call's result vector: output of `collect`, `Trace.pending`, traffic counts."""
        vector = np.asarray(vector)
        end = len(vector) - self.costs.size
        return vector[: end - 1], int(vector[end - 1]), vector[end:]

    def add_costs(self, vector: Any, totals: TrafficTotals) -> tuple[np.ndarray, int, CallCosts]:
        """As `split`, with the costs of the call, which it adds to the totals."""
        vector, pending, counts = self.split(vector)
        return vector, pending, totals.add(self.costs, counts)


class StepFunctions:
    """Worker functions of one step function, one for each form of its batches.

    Args:
        collect: Function of the `Trace` and the list of what single steps return. Returns a float64
            vector and a structure of tensors, which the worker function returns, and notes about
            them.
        weights: Function that returns variables which steps may be expected to read.
        replica_step: Optional function of the vector that carries the closure variables' values;
            makes the context, a `WorkerReplicaStep`, in which steps are traced.
        overlap: Whether a worker may run several of the functions at a time.
        begin: Optional function of the `Pulls` of a function, called before its steps are traced.
    """

    def __init__(
        self,
        context: StepContext,
        step: Callable[..., Any],
        collect: Callable[[Trace, list[Any]], tuple[tf.Tensor, Any, Any]],
        weights: Callable[[], Iterable[tf.Variable]],
        replica_step: Callable[[tf.Tensor], AbstractContextManager[WorkerReplicaStep | None]] = (
            lambda initial: contextlib.nullcontext()
        ),
        overlap: bool = False,
        begin: Callable[[Pulls], None] = lambda pulls: None,
    ) -> None:
        self._context, self._step, self._collect = context, step, collect
        self._begin = begin
        self._weights = weights
        self._make_replica_step = replica_step
        self._overlap = overlap
        self._functions: dict[str, TracedStep] = {}

    def __call__(
        self, batches: Batches, element_spec: Any = None, join: bool = True
    ) -> tuple[TracedStep, Any]:
        """The function for some batches.

        Args:
            element_spec: Type specification of the dataset's elements, if there is one.
            join: Whether the batches may be put together, to be sent in fewer messages.

        Returns:
            The `TracedStep`, and its argument besides the closure variables' values.
        """
        batch_spec = element_spec or tf.nest.map_structure(_with_any_batch_size, first_of(batches))
        payload: Any = batches
        spec: Any = [batch_spec] * len(batches)
        form = f"{len(batches)} apart"
        if join and not isinstance(batches, JoinedBatches) and can_be_joined(batches):
            batches = join_batches(batches)
        if isinstance(batches, JoinedBatches):
            payload, spec = batches.payload, spec_of(batches, batch_spec)
            form = repr(spec)
        # Of one batch's form only: that of ten takes a tenth of what the chief does for a closure.
        key = f"{batch_spec!r} {form}"
        if key not in self._functions:
            self._functions[key] = self._trace(spec, batch_spec)
        return self._functions[key], payload

    def _trace(self, spec: Any, batch_spec: Any) -> TracedStep:
        self._context.times.note_tracing()
        stay: set[Any] = set()

        def worker_function(initial: tf.Tensor, payload: Any) -> tuple[tf.Tensor, Any]:
            with (
                self._make_replica_step(initial) as replica_step,
                current_trace.being(Trace(initial)) as trace,
                current_counter.being(TrafficCounter()) as counter,
                current_pulls.being(self._pulls(stay, counter)) as pulls,
            ):
                self._begin(pulls)
                batches = separate(payload, batch_spec)
                results = [
                    self._context.strategy.run(self._step, args=(batch,)) for batch in batches
                ]
                vector, outputs, notes = self._collect(trace, results)
                # In the same tensor: each would cost a separate message.
                vector = tf.concat([vector, trace.pending()], 0)
                vector = tf.concat([vector, counter.counts([vector, outputs])], 0)
            traced[:] = counter, pulls.written_in_loops()
            found.update(
                variables=trace.variables,
                overwritten=trace.overwritten(),
                tables=trace.tables,
                notes=notes,
                # A sum of gradients is read and written from step to step.
                may_overlap=self._overlap and not trace.kept,
                replica_step=replica_step,
                whole_reads=list(pulls.whole_reads.values()),
            )
            return vector, outputs

        while True:
            traced: list[Any] = []
            found: dict[str, Any] = {}
            function = tf.function(worker_function, autograph=False)
            with self._context.strategy.scope():
                concrete = function.get_concrete_function(tf.TensorSpec([None], tf.float64), spec)
            counter, written_in_loops = traced
            if written_in_loops <= stay:
                costs = counter.summary(concrete.graph)
                return TracedStep(concrete=concrete, costs=costs, origin=function, **found)
            stay |= written_in_loops

    def _pulls(self, stay: set[Any], counter: TrafficCounter) -> Pulls:
        """Reads of the function being traced; with overlap, the first ones hold a lock."""
        extended, turn = self._context.extended, None
        if self._overlap:
            turn = ReadLock(extended.worker_states.prefix)
            counter.timer.at_arrival = turn.end
        return Pulls(self._weights(), stay, extended.compressors, turn)


def _with_any_batch_size(leaf: Any) -> Any:
    if isinstance(leaf, tf.Tensor) and leaf.shape.rank:
        return tf.TensorSpec([None] + leaf.shape.as_list()[1:], leaf.dtype)
    return tf.type_spec_from_value(leaf) if leaf is not None else None
