"""Counts what worker functions send and read, and for how long they wait for it.

What a function sends at each call is known once it is traced; the chief adds it up when a call
comes back. How many rows a lookup brings, and whether a branch is taken, the function has to count
itself; its counts come back with the rest of what it returns.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_psplus.cluster.config import task_name
from keras_psplus.communication import Traffic
from keras_psplus.core.base.threads import ThreadValue
from keras_psplus.core.batch.replica_step import Key, run_apart, time_after
from keras_psplus.core.graph.stand_ins import sources
from keras_psplus.core.graph.subgraph import with_inputs
from keras_psplus.log import warn_once
from keras_psplus.tf_internals import context, func_graph, resource_variable_ops
from keras_psplus.tf_internals import control_flow_func_graphs as control_flow
from keras_psplus.tf_internals import framework_ops as ops

# Seconds for which a worker function waits for the parameter servers, measured in its graph.


READ, SEND = "read", "send"
# Large values of a server that show when it has answered.
_SHOWN = 4


class Part(NamedTuple):
    name: str
    server: str | None = None


class TransferTimer:
    """Seconds of a step's reads and of its pushes, together and by server.

    Reads are timed from `began`, a scalar, until their values have arrived, pushes from the
    gradients on. `add` counts seconds of a `Part` wherever in the graph it is called.
    """

    def __init__(self, add: Callable[[Part, tf.Tensor], None]) -> None:
        self._add = add
        self._graph = ops.get_default_graph()
        self.began = self._begin = time_after([])
        self._pulled: list[tf.Tensor] = []
        self._arrivals: dict[str | None, tf.Tensor] = {}

    def note_pull(self, value: tf.Tensor) -> None:
        if ops.get_default_graph() is self._graph:
            self._pulled.append(value)

    def note_push(self, gradients: Any, operations: Iterable[tf.Operation]) -> None:
        leaves = [g for g in tf.nest.flatten(gradients, expand_composites=True) if g is not None]
        self.end_of_pulls(leaves)
        ready = time_after(leaves)
        by_server: dict[str, list[tf.Operation]] = {}
        for operation in operations:
            if not operation.outputs and "/job:ps" in operation.device:
                by_server.setdefault(operation.device, []).append(operation)
        done = []
        for device, updates in by_server.items():
            # One message from each server instead of one for each variable.
            with tf.device(device), tf.control_dependencies(updates):
                done.append(tf.no_op())
        if len(done) > 1:
            for device, one in zip(by_server, done):
                end = time_after([ready.op, one])
                self._add(Part(SEND, server_of(device)), end - ready)
        end = time_after([ready.op, *done])
        self._add(Part(SEND), end - ready)
        self._begin = end if ops.get_default_graph() is self._graph else None

    def end_of_pulls(self, results: Sequence[tf.Tensor]) -> None:
        """Counts the time until all noted reads have arrived, and restarts for later ones.

        Reads that the results do not need are pruned; waiting for them would execute them.
        """
        needed = set(sources(results)) if self._pulled else ()
        pulled, begin = [v for v in self._pulled if v.op in needed], self._begin
        self._pulled, self._begin = [], None
        if not pulled or begin is None:
            return
        is_here = ops.get_default_graph() is self._graph
        with contextlib.nullcontext() if is_here else self._graph.as_default():
            arrival = self._arrival_of(pulled)
            self._add(Part(READ), time_after([arrival]) - begin)
            by_server = _sent_by_servers(pulled)
            for server, sent in by_server.items() if len(by_server) > 1 else ():
                here = time_after([self._arrival_of(sent, server)])
                self._add(Part(READ, server), here - begin)

    def _arrival_of(self, values: Iterable[tf.Tensor], server: str | None = None) -> tf.Operation:
        """An operation on the worker that has needed the values themselves.

        TensorFlow takes out what only control dependencies hang on, and would wait for the servers'
        reading, not for the values' coming.
        """
        if server not in self._arrivals:
            with ops.control_dependencies(None), ops.device(None):
                handle = resource_variable_ops._variable_handle_from_shape_and_dtype(
                    [None], tf.float32, context.anonymous_name(), "arrivals", True
                )
            run_apart(handle.op)
            self._arrivals[server] = handle
        firsts = [tf.cast(tf.reshape(value, [-1])[:1], tf.float32) for value in values]
        handle = self._arrivals[server]
        arrival = tf.raw_ops.AssignVariableOp(resource=handle, value=tf.concat(firsts, 0))
        run_apart(arrival)
        return arrival


def server_of(device: str) -> str | None:
    """Name of the parameter server that a device is on, or None."""
    found = re.search(r"/job:ps/.*task:(\d+)", device)
    return task_name("ps", int(found[1])) if found else None


def _sent_by_servers(values: Iterable[tf.Tensor]) -> dict[str, list[tf.Tensor]]:
    """The largest tensors that each server sends for some values."""
    waiting, seen = list(values), set[int]()
    sent: dict[str, list[tf.Tensor]] = {}
    while waiting:
        tensor = waiting.pop()
        server = server_of(tensor.op.device)
        if id(tensor.op) in seen or tensor.dtype in (tf.resource, tf.variant, tf.string):
            continue
        if server is None:
            seen.add(id(tensor.op))
            waiting += tensor.op.inputs
        else:
            sent.setdefault(server, []).append(tensor)
    for server, found in sent.items():
        found.sort(key=lambda tensor: tensor.shape.num_elements() or 0)
        sent[server] = found[-_SHOWN:]
    return dict(sorted(sent.items()))


# The traffic counter of the worker function that a thread is tracing.
current_counter: ThreadValue[TrafficCounter] = ThreadValue()


def count(
    key: Key, logical: int | tf.Tensor, compressed: int | tf.Tensor, tensor: tf.Tensor | None = None
) -> None:
    counter = current_counter()
    if counter is not None:
        counter.add(key, logical, compressed, tensor)


class TrafficCounter:
    def __init__(self) -> None:
        self._graph = ops.get_default_graph()
        self._certain: list[tuple[Any, int, int, tf.Tensor | None]] = []
        self._counters: dict[Any, tf.Tensor] = {}
        self._seconds: dict[Part, list[tf.Tensor]] = {}
        self.timer = TransferTimer(self._add_seconds)

    def add(
        self,
        key: Key,
        logical: int | tf.Tensor,
        compressed: int | tf.Tensor,
        tensor: tf.Tensor | None = None,
    ) -> None:
        """Counts what the current place in the graph sends whenever it is run.

        That is `compressed` bytes in the place of `logical` ones; if nothing needs the `tensor`, it
        is not sent.
        """
        graph = ops.get_default_graph()
        if graph is self._graph and isinstance(logical, int) and isinstance(compressed, int):
            self._certain.append((key, logical, compressed, tensor))
        elif self._is_outermost_function(graph):
            numbers = [tf.cast(number, tf.float64) for number in (logical, compressed)]
            self._add_in_graph(key, tf.stack(numbers))
        else:
            # Such a function is traced once for all of its callers.
            warn_once(
                "what a tf.function inside of a step sends to the parameter servers is not counted "
                "in `strategy.communication`"
            )

    def _is_outermost_function(self, graph: tf.Graph) -> bool:
        while isinstance(graph, control_flow.ControlFlowFuncGraph):
            graph = graph.outer_graph
        return graph is self._graph

    def _add_in_graph(self, key: Any, numbers: tf.Tensor) -> None:
        if key not in self._counters:
            # In the function itself, also if a branch of a tf.cond comes upon it first.
            with self._graph.as_default(), ops.control_dependencies(None), ops.device(None):
                handle = resource_variable_ops._variable_handle_from_shape_and_dtype(
                    numbers.shape, numbers.dtype, context.anonymous_name(), "counter", True
                )
                zeros = tf.zeros(numbers.shape, numbers.dtype)
                tf.raw_ops.AssignVariableOp(resource=handle, value=zeros)
            self._counters[key] = handle
        tf.raw_ops.AssignAddVariableOp(resource=self._counters[key], value=numbers)

    def _add_seconds(self, part: Part, seconds: tf.Tensor) -> None:
        graph = ops.get_default_graph()
        if graph is self._graph:
            self._seconds.setdefault(part, []).append(seconds)
        elif self._is_outermost_function(graph):
            self._add_in_graph(part, tf.stack([seconds, tf.zeros([], tf.float64)]))

    def counts(self, results: Any) -> tf.Tensor:
        """Counts at run time, a float64 vector, of a function with some other results."""
        flat = tf.nest.flatten(results, expand_composites=True)
        leaves = [leaf for leaf in flat if isinstance(leaf, tf.Tensor)]
        self.timer.end_of_pulls(leaves)
        seconds = [tf.add_n(each) for each in self._seconds.values()]
        counted = [
            tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64)
            for handle in self._counters.values()
        ]
        ended = time_after([*leaves, *seconds])
        return tf.concat([*counted, tf.stack([*seconds, self.timer.began, ended])], 0)

    def summary(self, graph: tf.Graph) -> TrafficSummary:
        assert isinstance(graph, func_graph.FuncGraph)
        needed = with_inputs([*(tensor.op for tensor in graph.outputs), *graph.control_outputs])

        def is_sent(tensor: tf.Tensor | None) -> bool:
            return tensor is None or any(consumer in needed for consumer in tensor.consumers())

        certain: dict[Any, np.ndarray] = {}
        for key, logical, compressed, tensor in self._certain:
            if is_sent(tensor):
                so_far = certain.setdefault(key, np.zeros(2))
                so_far += (logical, compressed)
        return TrafficSummary(certain, list(self._counters), list(self._seconds))


class CallCosts(NamedTuple):
    """Costs of a call of a worker function, with its times by the worker's clock."""

    traffic: list[tuple[Key, np.ndarray]]
    parts: dict[Part, float]
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.parts.get(Part(READ), 0.0) + self.parts.get(Part(SEND), 0.0)

    def then(self, later: CallCosts) -> CallCosts:
        parts = {
            p: self.parts.get(p, 0.0) + later.parts.get(p, 0.0) for p in self.parts | later.parts
        }
        return CallCosts([*self.traffic, *later.traffic], parts, self.began, later.ended)


class TrafficSummary:
    """Costs of a worker function's calls, as recorded by `TrafficCounter`.

    What every call sends is `certain`; what it counts itself, or times, is in order.
    """

    def __init__(
        self, certain: dict[Key, np.ndarray], counted: Sequence[Any], timed: Sequence[Part]
    ) -> None:
        self.certain, self._counted, self._timed = certain, counted, timed

    @property
    def size(self) -> int:
        return 2 * len(self._counted) + len(self._timed) + 2

    def of_call(self, counts: np.ndarray) -> CallCosts:
        pairs, times = np.split(counts, [2 * len(self._counted)])
        traffic, parts = list(self.certain.items()), dict(zip(self._timed, times.tolist()))
        for key, pair in zip(self._counted, np.reshape(pairs, [-1, 2])):
            if isinstance(key, Part):
                parts[key] = parts.get(key, 0.0) + float(pair[0])
            else:
                traffic.append((key, pair))
        return CallCosts(traffic, parts, *times[-2:].tolist())


class CountedFunction(NamedTuple):
    """A worker's function beside its step, and what a call costs, from its `origin`."""

    concrete: tf.types.experimental.ConcreteFunction
    costs: TrafficSummary
    origin: Any


def counted(
    strategy: tf.distribute.Strategy, function: Callable[..., object], *specs: Any
) -> CountedFunction:
    """Traces a function of a worker that returns nothing but what it counts."""
    counters = []

    def counting(*args: Any) -> tf.Tensor:
        with current_counter.being(TrafficCounter()) as counter:
            function(*args)
            counters.append(counter)
            return counter.counts([])

    origin = tf.function(counting, autograph=False)
    with strategy.scope():
        concrete = origin.get_concrete_function(*specs)
    return CountedFunction(concrete, counters[-1].summary(concrete.graph), origin)


@contextlib.contextmanager
def timing_push(gradients: Any) -> Iterator[None]:
    """Context of sending gradients, which are on the worker, in a function that is traced."""
    counter, graph = current_counter(), tf.compat.v1.get_default_graph()
    before = 0 if counter is None else len(graph.get_operations())
    yield
    if counter is not None:
        counter.timer.note_push(gradients, graph.get_operations()[before:])


class TrafficTotals:
    """All that came back from workers, added up on the chief."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[Key, np.ndarray] = {}
        self.seconds = 0.0

    def add(self, summary: TrafficSummary, counts: np.ndarray) -> CallCosts:
        costs = summary.of_call(np.asarray(counts))
        with self._lock:
            self.seconds += costs.seconds
            for key, numbers in costs.traffic:
                self._bytes[key] = self._bytes.get(key, 0) + numbers
        return costs

    def traffic(self) -> list[Traffic]:
        with self._lock:
            totals = {key: [int(n) for n in numbers] for key, numbers in self._bytes.items()}
        return [
            Traffic(*key, logical, compressed, wire_bytes=compressed)
            for key, (logical, compressed) in totals.items()
        ]


def size_in_bytes(tensors: Sequence[tf.Tensor]) -> int | tf.Tensor:
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    sizes = [
        (tf.size(tensor, tf.int64) if size is None else size) * tensor.dtype.size
        for size, tensor in zip(sizes, tensors)
    ]
    return sum(sizes)
