"""The functions that workers run, one for each form of batches, and their logs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.batch.replica_step import run_apart
from keras_psplus.core.distributed_engine import DistributedEngine
from keras_psplus.core.graph import metrics as metric_logs
from keras_psplus.core.graph.compiled_calls import CompiledFunction
from keras_psplus.keras_internals.keras_parts import tree
from keras_psplus.parameter_server.pulls import GATHERS, Pulls, current_pulls, uses, written_by
from keras_psplus.parameter_server.traffic import (
    TrafficCounter,
    TrafficSummary,
    current_counter,
    size_in_bytes,
)
from keras_psplus.parameter_server.worker_function import (
    CHIEF,
    SMALL_BYTES,
    Batches,
    ClosureVariable,
    JoinedBatches,
    Trace,
    can_be_joined,
    current_trace,
    first_of,
    pack,
    separate,
    spec_of,
    unpack,
)
from keras_psplus.parameter_server.worker_function import join as join_batches
from keras_psplus.tf_internals import framework_ops as ops

if TYPE_CHECKING:
    from keras_psplus.parameter_server.context import StepContext
    from keras_psplus.parameter_server.pulls import WholeRead
    from keras_psplus.parameter_server.replica_step import WorkerReplicaStep
    from keras_psplus.parameter_server.traffic import CallCosts, TrafficTotals


# Totals of the closure variables, to which steps add what they return.


# Odd, so that no two shares of any step share a seed (mod 2 ** 31).
_SEED_STRIDE = 0x3C6EF35F


class ClosureTotals:
    """Values of closure variables, kept by the chief while steps are under way.

    `values` has the seeds of the beginning; `draws` is their advance in one step, once seen.
    """

    def __init__(
        self, variables: Sequence[ClosureVariable], draws: np.ndarray | None = None
    ) -> None:
        self.variables, self.values, self.draws = list(variables), pack(variables), draws
        self.steps = 0
        self._is_seed = self._flags(lambda variable: variable.is_seed)
        self._is_integer = self._flags(lambda variable: variable.dtype.is_integer)

    def _flags(self, of_variable: Callable[[ClosureVariable], bool]) -> np.ndarray:
        flags = [np.full(v.shape.num_elements(), of_variable(v)) for v in self.variables]
        return np.concatenate([np.zeros(0, bool), *flags])

    @property
    def has_seeds(self) -> bool:
        return bool(self._is_seed.any())

    @property
    def next(self) -> np.ndarray:
        """Values for the next step: no two steps draw the same."""
        return self.values if self.draws is None else self.values + self.draws * self.steps

    def next_for(self, share: int) -> np.ndarray:
        """Values for a worker's share of the next step: each share draws from other seeds."""
        values, first = self.next.copy(), 0
        for variable in self.variables:
            if variable.is_seed:
                values[first] = (values[first] + share * _SEED_STRIDE) % (1 << 31)
            first += variable.shape.num_elements()
        return values

    def note_draws(self, changes: np.ndarray, steps: int) -> None:
        if self.draws is None:
            self.draws = np.where(self._is_seed, changes / steps, 0.0)

    def add(
        self,
        changes: np.ndarray,
        parts: np.ndarray,
        steps: int,
        overwritten: Sequence[ClosureVariable],
    ) -> np.ndarray:
        """Adds the changes of a step's shares; returns sums for metrics, means for others.

        `parts` are each share's part of the rows; `overwritten` the variables that a step replaces.
        """
        self.note_draws(changes[0], steps)
        change = changes[0]
        if len(parts) > 1:
            replaced = {id(variable) for variable in overwritten}
            is_sum = self._flags(lambda v: v.kind == "total" and id(v) not in replaced)
            means = parts @ changes
            means = np.where(self._is_integer, np.rint(means), means)
            change = np.where(is_sum, changes.sum(0), means)
        change = np.where(self._is_seed, 0.0, change)
        self.values = self.values + change
        return change

    def write(self) -> None:
        """Writes them to the chief's variables, seeds after all steps that have been sent."""
        unpack(self.variables, self.next)


def are_same(variables: Sequence[object], others: Sequence[object]) -> bool:
    return len(variables) == len(others) and all(a is b for a, b in zip(variables, others))


# Logs of workers' steps: a step's result vector, and the chief's computation from it.


class LogForm(NamedTuple):
    name: str
    dtype: Any
    shape: tuple[int, ...]


class LogNotes(NamedTuple):
    """Layout of the logs in a step's result vector.

    The chief computes `computed` once more; `states` are the numbers of metrics' closure variables;
    `size` is of the logs and of what they are computed from.
    """

    forms: list[LogForm]
    computed: metric_logs.MetricLogs
    states: list[int]
    size: int

    def split(self, vector: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        first = vector.shape[-1] - self.size
        numbers = sum(math.prod(form.shape) for form in self.forms)
        changes, logs, inputs = np.split(vector, [first, first + numbers], -1)
        return changes, logs, inputs

    def logs(self, vector: np.ndarray) -> dict[str, Any]:
        """Logs of a vector of their numbers, in the shapes that Keras gives them."""
        ends = np.cumsum([math.prod(form.shape) for form in self.forms], dtype=int)
        # `[()]` makes an array without axes a number.
        return {
            form.name: part.reshape(form.shape).astype(form.dtype)[()]
            for form, part in zip(self.forms, np.split(vector, ends[:-1]))
        }


def changes_and_logs(
    trace: Trace,
    results: Sequence[dict[str, Any]],
    metrics: Callable[[Any], Mapping[str, Any]] | None = None,
) -> tuple[tf.Tensor, tuple[()], LogNotes]:
    """Joins a step's changes and logs in one tensor: each would cost a message.

    `metrics` returns, of a step that several workers take together, a flat dict of results of
    metrics of closure variables. It raises ValueError if the chief cannot repeat the computation of
    a log from a metric.
    """
    logs = _tensors(results[-1])
    states = [i for i, variable in enumerate(trace.variables) if variable.kind == "total"]
    handles = [trace.handle_of(trace.variables[i]) for i in states]
    graph = tf.compat.v1.get_default_graph()
    here = {n: value for n, value in logs.items() if getattr(value, "graph", None) is graph}
    # The first write of a state is that of its value before the step.
    computed = metric_logs.MetricLogs(here, handles, 1, _can_read, can_average=False)
    if metrics is not None and computed.refused:
        # An object that is called as a metric is, is taken for its result.
        named = metrics(list(trace.variables))
        metric_logs.refuse({n: why for n, why in computed.refused.items() if n not in named})
    forms = [LogForm(n, one.dtype.as_numpy_dtype, tuple(one.shape)) for n, one in logs.items()]
    values = [*logs.values(), *computed.inputs]
    parts = [tf.cast(tf.reshape(value, [-1]), tf.float64) for value in values]
    size = sum(value.shape.num_elements() for value in values)
    notes = LogNotes(forms, computed, states, size)
    return tf.concat([trace.changes(), *parts], 0), (), notes


def results_of(model: keras.Model, variables: Iterable[ClosureVariable]) -> dict[str, Any]:
    """The results of metrics that have one of some variables, by names as in logs."""
    return _flat(
        {
            metric.name: metric.result()
            for metric in model.metrics
            if any(v._value is used for v in metric.variables for used in variables)
        }
    )


def _flat(results: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in results.items():
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat


def _can_read(read: metric_logs.Read) -> bool:
    return read.is_first or read.is_last


def _tensors(logs: Mapping[str, Any] | None) -> dict[str, tf.Tensor]:
    values = {name: tf.convert_to_tensor(value) for name, value in _flat(logs or {}).items()}
    # Of one number for each row, another worker has another number of them.
    return {n: v if v.shape.is_fully_defined() else tf.reduce_mean(v) for n, v in values.items()}


class ComputedLogs:
    """Computes logs once more, on the chief, from the totals of metrics."""

    def __init__(self, function: TracedStep, results: Callable[[Any], Mapping[str, Any]]) -> None:
        self._function, self._results = function, results
        self._names: list[str] = []
        origin = tf.function(self._compute, autograph=False)
        specs = [tf.TensorSpec([None], tf.float64)] * 3
        with tf.device(CHIEF):
            # TensorFlow holds what it was traced from weakly.
            self._concrete, self._origin = origin.get_concrete_function(*specs), origin

    def __call__(
        self, totals: np.ndarray, before: np.ndarray, inputs: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The logs, by totals after and before a step, and workers' averaged other inputs."""
        with tf.device(CHIEF):
            found = self._concrete(*(tf.constant(one) for one in (totals, before, inputs)))
        return {name: value.numpy() for name, value in zip(self._names, found)}

    def _compute(self, totals: tf.Tensor, before: tf.Tensor, inputs: tf.Tensor) -> list[tf.Tensor]:
        function, notes = self._function, self._function.notes
        computed = notes.computed
        with current_trace.being(Trace(totals)) as trace:
            handles = [trace.handle_of(variable) for variable in function.variables]
            reads = [
                _value_of(function.variables, notes.states[read.state], before if early else totals)
                for read in computed.reads
                for early in [read.is_first and not read.is_last]
            ]
            of_states = [handles[i] for i in notes.states]
            found = computed.rebuild(reads, _parts(inputs, computed.inputs), of_states)
            if computed.refused:
                by_name = self._results(function.variables)
                found |= {n: value for n, value in by_name.items() if n in computed.refused}
        self._names[:] = found
        return [tf.convert_to_tensor(value) for value in found.values()]


def _value_of(variables: Sequence[ClosureVariable], number: int, vector: tf.Tensor) -> tf.Tensor:
    sizes = [variable.shape.num_elements() for variable in variables]
    first, variable = sum(sizes[:number]), variables[number]
    value = tf.reshape(vector[first : first + sizes[number]], variable.shape)
    return tf.cast(value, variable.dtype)


def _parts(vector: tf.Tensor, likes: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    parts = tf.split(vector, [like.shape.num_elements() for like in likes]) if likes else []
    return [tf.cast(tf.reshape(p, like.shape), like.dtype) for p, like in zip(parts, likes)]


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

    `overwritten` are the closure variables that are given values instead of being added to,
    `tables` those it keeps gradients for, `notes` what `collect` noted, `replica_step` the context
    of tracing (None for one worker alone). TensorFlow holds the `origin` weakly.
    """

    concrete: tf.types.experimental.ConcreteFunction
    variables: list[ClosureVariable]
    overwritten: list[ClosureVariable]
    tables: list[Any]
    notes: Any
    costs: TrafficSummary
    turns: Turns | None
    replica_step: WorkerReplicaStep | None
    whole_reads: list[WholeRead]
    origin: Any

    def split(self, vector: np.ndarray | tf.Tensor) -> tuple[np.ndarray, int, np.ndarray]:
        """Splits a call's result vector: output of `collect`, `Trace.pending`, traffic counts."""
        vector = np.asarray(vector)
        end = len(vector) - self.costs.size
        return vector[: end - 1], int(vector[end - 1]), vector[end:]

    def add_costs(self, vector: Any, totals: TrafficTotals) -> tuple[np.ndarray, int, CallCosts]:
        vector, pending, counts = self.split(vector)
        return vector, pending, totals.add(self.costs, counts)


# Overlap of asynchronous steps: a worker reads for its next step while it sends gradients.
#
#     worker -> server   | forward |    g3   g2   g1  | forward |
#     server             |              u3   u2   u1  |
#     server -> worker   |                w3   w2   w1|            read for the next step
#
# 1. For each variable that a step writes to, there are two queues on the worker. Step n takes an
#    element from queue n % 2 before it uses the variable, and puts one into the other queue when it
#    has updated it.
# 2. So the next step, which is under way as well, reads all that this one writes: a gradient lacks
#    no more updates than without overlap.
# 3. Step 0, after one of another function or one that failed, waits for nothing, and runs alone.


_numbers = itertools.count(1)


class Turns:
    """Queues by which steps of one function that overlap on a worker follow each other.

    Added to the function that is being traced, to what it has used until now. `place` is the
    number of its step.
    """

    def __init__(self, prefix: str, place: tf.Tensor, pulls: Pulls) -> None:
        self._name = f"{prefix}/turns/{next(_numbers)}"
        used = _uses_of_written(prefix, pulls)
        self._count = len(used)
        place = tf.cast(place, tf.int32)
        is_odd, waits = place % 2, tf.cast(place > 0, tf.int32)
        even_and_odd = [1 - is_odd, is_odd]
        for number, ((device, _), users) in enumerate(used.items()):
            with ops.device(None), ops.control_dependencies(None):
                queues = [self._queue(number, parity) for parity in range(2)]
                taken = [
                    run_apart(_take(q, waits * count)[0].op)
                    for q, count in zip(queues, even_and_odd)
                ]
            with ops.device(device), ops.control_dependencies(taken):
                # One message for all of them.
                is_free = run_apart(tf.no_op())
            for user in users:
                user._add_control_input(is_free)
            with ops.device(device), ops.control_dependencies(users):
                is_done = run_apart(tf.no_op())
            with ops.device(None), ops.control_dependencies([is_done]):
                for queue, count in zip(queues, reversed(even_and_odd)):
                    run_apart(_put(queue, tf.zeros([count], tf.int32)))
            for queue in queues:
                run_apart(queue.op)

    def reset(self) -> None:
        """Empties the queues on the worker."""
        for queue in self._queues():
            _take(queue, tf.raw_ops.QueueSizeV2(handle=queue))

    def release(self) -> None:
        """Lets the step go on that waits for one that has failed."""
        for queue in self._queues():
            _put(queue, tf.zeros([1], tf.int32))

    def _queues(self) -> Iterator[tf.Tensor]:
        for number in range(self._count):
            yield from (self._queue(number, parity) for parity in range(2))

    def _queue(self, number: int, parity: int) -> tf.Tensor:
        name = f"{self._name}/{number}/{parity}"
        return tf.raw_ops.FIFOQueueV2(component_types=[tf.int32], shapes=[[]], shared_name=name)


def _take(queue: tf.Tensor, count: tf.Tensor) -> Any:
    return tf.raw_ops.QueueDequeueManyV2(handle=queue, n=count, component_types=[tf.int32])


def _put(queue: tf.Tensor, elements: tf.Tensor) -> Any:
    return tf.raw_ops.QueueEnqueueManyV2(handle=queue, components=[elements])


def _uses_of_written(
    prefix: str, pulls: Pulls
) -> dict[tuple[str | None, int | None], list[tf.Operation]]:
    """Operations that use what the function being traced writes to, by server and variable.

    A server's small variables and what stays there, such as slots, are one, and so are the worker's
    own states.
    """
    graph = ops.get_default_graph()
    written = written_by(graph.get_operations(), graph)
    used = [(op, handle) for op, handle in uses(graph) if id(handle) in written]
    parts = [part for read in pulls.whole_reads.values() for part in read.parts]
    alone = {id(part.handle) for part in parts if size_in_bytes([part]) > SMALL_BYTES}
    alone |= {id(handle) for op, handle in used if op.type in GATHERS}
    found: dict[tuple[str | None, int | None], list[tf.Operation]] = {}
    for op, handle in used:
        if "/job:ps" in handle.device:
            place = handle.device, id(handle) if id(handle) in alone else None
            found.setdefault(place, []).append(op)
        elif tf.is_symbolic_tensor(handle) and _is_state(handle.op, prefix):
            found.setdefault((None, None), []).append(op)
    return found


def _is_state(op: tf.Operation, prefix: str) -> bool:
    return op.type == "VarHandleOp" and op.get_attr("shared_name").startswith(prefix.encode())


class StepFunctions:
    """Worker functions of one step function, one for each form of its batches.

    `collect` makes, of the `Trace` and what single steps return, a float64 vector, other outputs,
    and notes. Steps are expected to read `weights()`. `replica_step` makes the context of tracing,
    of the vector that carries the closure variables' values. With `overlap`, a worker may run
    several at a time. `begin` is called with the `Pulls` before steps are traced.
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
        """The `TracedStep` for some batches, joined if that may be, and its other argument."""
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
        extended = self._context.extended

        def worker_function(initial: tf.Tensor, payload: Any) -> tuple[tf.Tensor, Any]:
            with (
                self._make_replica_step(initial) as replica_step,
                current_trace.being(Trace(initial)) as trace,
                current_counter.being(TrafficCounter()) as counter,
                current_pulls.being(Pulls(self._weights(), stay, extended.compressors)) as pulls,
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
                # A sum of gradients is read and written from step to step, rows once it has ended.
                overlaps = self._overlap and not trace.kept and not trace.tables
                prefix = extended.worker_states.prefix
                turns = Turns(prefix, initial[-1], pulls) if overlaps else None
            traced[:] = counter, pulls.written_in_loops()
            found.update(
                variables=trace.variables,
                overwritten=trace.overwritten(),
                tables=trace.tables,
                notes=notes,
                turns=turns,
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


def _with_any_batch_size(leaf: Any) -> Any:
    if isinstance(leaf, tf.Tensor) and leaf.shape.rank:
        return tf.TensorSpec([None] + leaf.shape.as_list()[1:], leaf.dtype)
    return tf.type_spec_from_value(leaf) if leaf is not None else None
