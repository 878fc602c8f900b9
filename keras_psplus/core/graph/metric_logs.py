"""Logs of metrics, recomputed from the metrics' states of all replicas.

A step's logs are tensors of its graph, and a replica's metrics know its own rows there. So the
operations between the reads of metrics' states and the logs are repeated on what the reads would
have been in one process:

    state before the step + sum over replicas of (what was read - state before the step)

What else goes into such a log is averaged over the replicas first, as logs of a replica's own are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_psplus.core.graph.called_functions import nodes_of
from keras_psplus.core.graph.subgraph import Subgraph

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
        """Reason why a part of the graph must not be repeated, or None."""
        if early & _used(part, wanted):
            return _UPDATED_AFTER
        if _depends_on_rows(part) and not self._can_average:
            return "it is computed from rows of the batch, which only one worker has"
        return next(filter(None, map(self._why_not_operation, part.operations)), None)

    def _why_not_operation(self, operation: tf.Operation) -> str | None:
        """Reason why an operation must not be repeated, or None."""
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

        Returns:
            Dict of the logs called `names`.
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
