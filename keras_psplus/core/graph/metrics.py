"""Metrics in a step: their logs, recomputed from all replicas' states, and losses they call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_psplus.core.graph import subgraph
from keras_psplus.core.graph.subgraph import Subgraph, nodes_of

# Logs of metrics, recomputed from the metrics' states of all replicas.
#
# A step's logs are tensors of its graph, and a replica's metrics know its own rows there. So the
# operations between the reads of metrics' states and the logs are repeated on what the reads would
# have been in one process:
#
#     state before the step + sum over replicas of (what was read - state before the step)
#
# Other values in such a log are averaged over the replicas first, as logs of a replica's own
# are.

_READS = ("ReadVariableOp", "VariableShape", "VarIsInitializedOp")
_UPDATED_AFTER = "the metric is updated after it is read"
_CALLS_PYTHON = ("EagerPyFunc", "PyFunc")


class Read(NamedTuple):
    """A value that the step has read of a metric's state.

    Attributes:
        tensor: What was read.
        is_last: Whether the step does not change the state any more after that.
        is_first: Whether the step has not changed the state before.
    """

    tensor: tf.Tensor
    state: int
    is_last: bool
    is_first: bool


class MetricLogs:
    """The logs of one step that are computed from the states of metrics.

    Args:
        logs: Dict from names to symbolic tensors of one graph.
        handles: The handles of metrics' states in that graph.
        first_writes: How many writes of each state come before the step.
        can_read: Whether it can be said what one process would have read; of any `Read` by default.
        can_average: Whether a log can be averaged over replicas after it was computed once more.

    Attributes:
        names: Names of the logs that are computed once more.
        refused: Dict from the names of logs for which that cannot be done to why.
        reads: List of `Read`.
        inputs: What they need besides: floats of one size to be averaged over replicas.
        depends_on_rows: Whether they need more of the replica's, so that they are to be averaged.
    """

    def __init__(
        self,
        logs: Mapping[str, tf.Tensor],
        handles: Sequence[tf.Tensor],
        first_writes: int = 0,
        can_read: Callable[[Read], bool] = lambda read: True,
        can_average: bool = True,
    ) -> None:
        self._handles, self._can_average = list(handles), can_average
        graph = next((tensor.graph for tensor in [*logs.values(), *handles]), None)
        operations = graph.get_operations() if graph is not None else []
        self._order = {operation.name: i for i, operation in enumerate(operations)}
        found = [read for i in range(len(handles)) for read in self._reads_of(i, first_writes)]
        sources = [*(read.tensor for read in found), *self._handles]
        early = {read.tensor.ref() for read in found if not can_read(read)}
        self.names: list[str] = []
        self.refused: dict[str, str] = {}
        for name, tensor in logs.items():
            part = Subgraph([tensor], sources)
            if part.has(tensor):
                why = self._why_not(part, {tensor.ref()}, early)
                if why is None:
                    self.names.append(name)
                else:
                    self.refused[name] = why
        self._part = Subgraph([logs[name] for name in self.names], sources)
        used = _used(self._part, {logs[name].ref() for name in self.names})
        self.reads = [read for read in found if read.tensor.ref() in used]
        self.inputs = [t for t in self._part.inputs if _is_averaged(t)]
        self.depends_on_rows = _depends_on_rows(self._part)

    def _reads_of(self, state: int, first_writes: int) -> Iterator[Read]:
        consumers = [one for one in self._handles[state].consumers() if one.name in self._order]
        places = sorted(self._order[one.name] for one in consumers if _writes(one))[first_writes:]
        for one in consumers:
            if one.type == "ReadVariableOp":
                place = self._order[one.name]
                yield Read(
                    one.outputs[0],
                    state,
                    all(write < place for write in places),
                    all(write > place for write in places),
                )

    def _why_not(self, part: Subgraph, wanted: set[Any], early: set[Any]) -> str | None:
        if early & _used(part, wanted):
            return _UPDATED_AFTER
        if _depends_on_rows(part) and not self._can_average:
            return "it is computed from rows of the batch, which only one worker has"
        return next(filter(None, map(self._why_not_operation, part.operations)), None)

    def _why_not_operation(self, operation: tf.Operation) -> str | None:
        handles = [t for t in operation.inputs if any(t is handle for handle in self._handles)]
        if handles and _writes(operation):
            return "it is computed in a function that changes the metric"
        if any(
            _writes(other) and self._order[other.name] > self._order[operation.name]
            for handle in handles
            for other in handle.consumers()
        ):
            return _UPDATED_AFTER
        stateful = operation.op_def.is_stateful and operation.type not in _CALLS_PYTHON
        if stateful and not handles:
            return f"it is computed by an operation that is not to be run twice ({operation.type})"
        return None

    def rebuild(
        self, read: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], handles: Sequence[Any] = ()
    ) -> dict[str, tf.Tensor]:
        """Computes the logs once more.

        Args:
            read: Tensors in the place of what was read, in the order of `reads`.
            inputs: Tensors in the place of `inputs`.
            handles: Handles in the place of those of the states, if it is in another graph.
        """
        values = {one.tensor.ref(): value for one, value in zip(self.reads, read)}
        values |= {one.ref(): value for one, value in zip(self.inputs, inputs)}
        values |= {one.ref(): value for one, value in zip(self._handles, handles)}
        return dict(zip(self.names, self._part.repeat(values, "metric_logs")))


def refuse(refused: Mapping[str, str]) -> None:
    """Raises ValueError if there are logs that cannot be those of the global batch."""
    for name, why in refused.items():
        raise ValueError(
            f"The log '{name}' is computed from a metric whose state is summed over all workers "
            f"when the step ends, and it cannot be computed once more from the sum: {why}. Return "
            "the result of a metric under the metric's own name, compute the log outside of a "
            "tf.function (`fit` compiles the whole step), or compute it in a callback. "
            f"Received: the log '{name}' of a step"
        )


def _used(part: Subgraph, wanted: set[Any]) -> set[Any]:
    """References of the tensors that a part of a graph uses, and its results."""
    return wanted | {t.ref() for operation in part.operations for t in operation.inputs}


def _is_averaged(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating and tensor.shape.is_fully_defined())


def _depends_on_rows(part: Subgraph) -> bool:
    return any(t.dtype.is_floating and not _is_averaged(t) for t in part.inputs)


def _writes(operation: tf.Operation) -> bool:
    if operation.type in _READS or operation.type.startswith("ResourceGather"):
        return False
    functions = list(nodes_of(operation))
    if not functions:
        return operation.type not in ("If", "While", "PartitionedCall", "StatefulPartitionedCall")
    return any(
        node.op.startswith(("Assign", "Resource")) and not node.op.startswith("ResourceGather")
        for node in functions
    )


# Losses that metrics call: numbers of the replica's own rows.
#
# Elsewhere in a step, the value of a loss stands for that of the global batch: weighted by rows,
# the values of all replicas add up to it (`core/batch/losses.py`). A metric of a user's own adds
# its loss to a state, which is summed over replicas beside a count of its own. So there a loss is
# what it is. Keras's `Mean` and `Sum` are given the number of the global batch again.

_FUNCTIONS = keras.metrics.MeanMetricWrapper


class MetricLosses:
    """The losses of one replica's step, inside metrics and outside of them.

    Attributes:
        are_local: Whether losses are those of the replica's own rows: inside of metrics.
        correction: Function that returns the factor by which the mask of the next loss would
            correct it, or None.
    """

    def __init__(self) -> None:
        self.are_local = False
        self.correction: Callable[[], tf.Tensor] | None = None
        # Pairs of a loss, and a function that returns the number of the global batch.
        self._known: list[tuple[tf.Tensor, Callable[[], tf.Tensor]]] = []

    @contextlib.contextmanager
    def inside(self, metric: keras.metrics.Metric) -> Iterator[None]:
        """Context of a metric's `update_state`."""
        outer = self.are_local
        # A function's result is for the mean that calls it.
        is_function = type(metric).update_state is _FUNCTIONS.update_state
        self.are_local = not is_function
        try:
            yield
        finally:
            self.are_local = outer

    def note(self, loss: tf.Tensor, of_batch: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Notes a loss, and what returns the number of the global batch; returns the loss."""
        self._known.append((loss, functools.cache(of_batch)))
        return loss

    def take_correction(self) -> Callable[[], tf.Tensor] | None:
        """The `correction`, which is None after that."""
        correction, self.correction = self.correction, None
        return correction

    def of_batch(self, value: tf.Tensor) -> tf.Tensor | None:
        """The number that a scalar would be with the losses of the global batch.

        Returns:
            Scalar tensor, or None if no loss is in it. Of eager tensors, only losses are known.
        """
        for loss, of_batch in self._known:
            if loss is value:
                return of_batch()
        if tf.executing_eagerly() or not hasattr(value, "op"):
            return None
        here = [(loss, f) for loss, f in self._known if _graph_of(loss) is value.graph]
        part = subgraph.Subgraph([value], [loss for loss, _ in here])
        if not here or not part.has(value):
            return None
        if any(operation.op_def.is_stateful for operation in part.operations):
            return value
        used = {t.ref() for operation in part.operations for t in operation.inputs}
        values = {loss.ref(): f() for loss, f in here if loss.ref() in used}
        return part.repeat(values, "loss_of_batch")[0]


def _graph_of(tensor: tf.Tensor) -> tf.Graph | None:
    return getattr(tensor, "graph", None) if hasattr(tensor, "op") else None


def update_state(
    losses: MetricLosses, metric: keras.metrics.Metric, update: Callable[..., Any]
) -> Callable[..., Any]:
    """A metric's method `update_state`, in whose call losses are local."""

    @functools.wraps(update)
    def update_with_local_losses(*args: Any, **kwargs: Any) -> Any:
        with losses.inside(metric):
            return update(*args, **kwargs)

    return update_with_local_losses


# States of metrics, which are totals over replicas.


def accumulates(variable: keras.Variable) -> bool:
    """Whether a Keras variable is a metric's state, a total over replicas."""
    return bool(variable.synchronization == "on_read" and variable.aggregation == "sum")


def added(after: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    """The change that a step made to a total; zero if it stays infinite."""
    # inf - inf would be NaN.
    return tf.where(tf.equal(after, before), tf.zeros_like(after), after - before)
