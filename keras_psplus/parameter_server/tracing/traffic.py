"""Counts what worker functions send and read, and for how long they wait for it.

What a function sends at each call is known once it is traced; the chief adds it up when a call
comes back. How many rows a lookup brings, and whether a branch is taken, the function has to count
itself; its counts come back with the rest of what it returns.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_psplus.communication import Traffic
from keras_psplus.core.base.thread_value import ThreadValue
from keras_psplus.core.batch.clock import time_after
from keras_psplus.core.batch.traffic import Key
from keras_psplus.core.graph.subgraph import with_inputs
from keras_psplus.log import warn_once
from keras_psplus.parameter_server.tracing.transfer_timer import READ, SEND, Part, TransferTimer
from keras_psplus.tf_internals import context, func_graph, resource_variable_ops
from keras_psplus.tf_internals import control_flow_func_graphs as control_flow
from keras_psplus.tf_internals import framework_ops as ops

# The traffic counter of the worker function that a thread is tracing.
current_counter: ThreadValue[TrafficCounter] = ThreadValue()


def count(
    key: Key, logical: int | tf.Tensor, compressed: int | tf.Tensor, tensor: tf.Tensor | None = None
) -> None:
    """Counts in the counter of the function being traced, if any; see `add`."""
    counter = current_counter()
    if counter is not None:
        counter.add(key, logical, compressed, tensor)


class TrafficCounter:
    """Traffic of one worker function at each call, recorded while it is traced."""

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

        Args:
            key: Path, direction and description of the compressor, as in `Traffic`.
            logical: Bytes of the tensor: int, or a scalar.
            compressed: Bytes of what is sent in its place.
            tensor: Optional tensor of what is sent; if nothing needs it, it is not sent.
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
        """Costs of a call, once the function has been traced into a graph."""
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
    """Costs of one call of a worker function.

    Attributes:
        traffic: List of keys and pairs of bytes.
        parts: Dict from `Part` to seconds.
        began, ended: Times of the call by the worker's clock.
    """

    traffic: list[tuple[Key, np.ndarray]]
    parts: dict[Part, float]
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """Seconds for which the worker has waited for servers."""
        return self.parts.get(Part(READ), 0.0) + self.parts.get(Part(SEND), 0.0)

    def then(self, later: CallCosts) -> CallCosts:
        """Costs of this call and a later one together."""
        parts = {
            p: self.parts.get(p, 0.0) + later.parts.get(p, 0.0) for p in self.parts | later.parts
        }
        return CallCosts([*self.traffic, *later.traffic], parts, self.began, later.ended)


class TrafficSummary:
    """Costs of a worker function's calls, as recorded by `TrafficCounter`.

    Args:
        certain: Dict from keys to what every call sends.
        counted: Keys of what a call counts itself, in order: of bytes, and `Part`s.
        timed: The `Part`s of every call, in order.
    """

    def __init__(
        self, certain: dict[Key, np.ndarray], counted: Sequence[Any], timed: Sequence[Part]
    ) -> None:
        self.certain, self._counted, self._timed = certain, counted, timed

    @property
    def size(self) -> int:
        """Length of the vector that a call returns."""
        return 2 * len(self._counted) + len(self._timed) + 2

    def of_call(self, counts: np.ndarray) -> CallCosts:
        """The costs of one call."""
        pairs, times = np.split(counts, [2 * len(self._counted)])
        traffic, parts = list(self.certain.items()), dict(zip(self._timed, times.tolist()))
        for key, pair in zip(self._counted, np.reshape(pairs, [-1, 2])):
            if isinstance(key, Part):
                parts[key] = parts.get(key, 0.0) + float(pair[0])
            else:
                traffic.append((key, pair))
        return CallCosts(traffic, parts, *times[-2:].tolist())


class CountedFunction(NamedTuple):
    """A function of a worker, beside its step, and what a call costs.

    TensorFlow holds its `origin`, from which it is traced, weakly.
    """

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
    """All that came back from workers, added up on the chief.

    Attributes:
        seconds: Seconds for which workers have waited.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[Key, np.ndarray] = {}
        self.seconds = 0.0

    def add(self, summary: TrafficSummary, counts: np.ndarray) -> CallCosts:
        """Adds what one call has cost, and returns it."""
        costs = summary.of_call(np.asarray(counts))
        with self._lock:
            self.seconds += costs.seconds
            for key, numbers in costs.traffic:
                self._bytes[key] = self._bytes.get(key, 0) + numbers
        return costs

    def traffic(self) -> list[Traffic]:
        """List of `Traffic`."""
        with self._lock:
            totals = {key: [int(n) for n in numbers] for key, numbers in self._bytes.items()}
        return [
            Traffic(*key, logical, compressed, wire_bytes=compressed)
            for key, (logical, compressed) in totals.items()
        ]


def size_in_bytes(tensors: Sequence[tf.Tensor]) -> int | tf.Tensor:
    """Bytes of some tensors: an int if all shapes are known, else a scalar."""
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    sizes = [
        (tf.size(tensor, tf.int64) if size is None else size) * tensor.dtype.size
        for size, tensor in zip(sizes, tensors)
    ]
    return sum(sizes)
