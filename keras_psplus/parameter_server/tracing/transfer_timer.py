"""For how long a worker function waits for the parameter servers, measured in its graph."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from keras_psplus.tf_internals import context, func_graph, resource_variable_ops
from keras_psplus.tf_internals import framework_ops as ops


class TransferTimer:
    """Seconds of a step's reads and of its pushes.

    Reads are timed from the step's start until their values have arrived, pushes from the gradients
    on.

    Args:
        add: Function that counts seconds, a scalar, wherever in the graph it is called.
    """

    def __init__(self, add: Callable[[tf.Tensor], None]) -> None:
        self._add = add
        self._graph = ops.get_default_graph()
        self._begin = tf.timestamp()
        self._pulled: list[tf.Tensor] = []
        self._arrivals: tf.Tensor | None = None
        # Called with the operation that has all that the function reads first.
        self.at_arrival: Callable[[tf.Operation], None] | None = None

    def note_pull(self, value: tf.Tensor) -> None:
        """Notes a value that a worker reads."""
        if ops.get_default_graph() is self._graph:
            self._pulled.append(value)

    def note_push(self, gradients: Any, operations: Iterable[tf.Operation]) -> None:
        """Notes that gradients have been pushed.

        Args:
            gradients: The gradients, on the worker.
            operations: What was put into the graph to send them and to update variables.
        """
        leaves = [g for g in tf.nest.flatten(gradients, expand_composites=True) if g is not None]
        self.end_of_pulls(leaves)
        with tf.control_dependencies(leaves):
            ready = tf.timestamp()
        by_server: dict[str, list[tf.Operation]] = {}
        for operation in operations:
            if not operation.outputs and "/job:ps" in operation.device:
                by_server.setdefault(operation.device, []).append(operation)
        done = []
        for device, updates in by_server.items():
            # One message from each server instead of one for each variable.
            with tf.device(device), tf.control_dependencies(updates):
                done.append(tf.no_op())
        with tf.control_dependencies([ready.op, *done]):
            end = tf.timestamp()
        self._add(end - ready)
        self._begin = end if ops.get_default_graph() is self._graph else None

    def end_of_pulls(self, results: Sequence[tf.Tensor]) -> None:
        """Counts the time until all noted reads have arrived, and restarts for later ones.

        Args:
            results: Tensors that the function returns. Reads that they do not need are pruned from
                the graph, and waiting for them would execute them.
        """
        needed = _needed_for(results) if self._pulled else ()
        pulled, begin = [v for v in self._pulled if v.op in needed], self._begin
        self._pulled, self._begin = [], None
        if not pulled or begin is None:
            return
        is_here = ops.get_default_graph() is self._graph
        with contextlib.nullcontext() if is_here else self._graph.as_default():
            arrival = self._arrival_of(pulled)
            with tf.control_dependencies([arrival]):
                self._add(tf.timestamp() - begin)
            if self.at_arrival is not None:
                self.at_arrival(arrival)

    def _arrival_of(self, values: Iterable[tf.Tensor]) -> tf.Operation:
        """An operation on the worker that has needed the values themselves.

        TensorFlow takes out what only control dependencies hang on, and would wait for the servers'
        reading, not for the values' coming.
        """
        if self._arrivals is None:
            with ops.control_dependencies(None), ops.device(None):
                self._arrivals = resource_variable_ops._variable_handle_from_shape_and_dtype(
                    [None], tf.float32, context.anonymous_name(), "arrivals", True
                )
        firsts = [tf.cast(tf.reshape(value, [-1])[:1], tf.float32) for value in values]
        return tf.raw_ops.AssignVariableOp(resource=self._arrivals, value=tf.concat(firsts, 0))


def _needed_for(tensors: Iterable[tf.Tensor]) -> set[tf.Operation]:
    """Operations that tensors depend on, also outside of their branch."""
    waiting, needed = list(tensors), set()
    captures = {}
    while waiting:
        tensor = waiting.pop()
        graph = tensor.graph
        if graph not in captures:
            pairs = graph.captures if isinstance(graph, func_graph.FuncGraph) else ()
            captures[graph] = {id(inside): outside for outside, inside in pairs}
        outside = captures[graph].get(id(tensor))
        if outside is not None:
            # What the outermost function captures lies with the chief, or is a handle.
            waiting += [outside] if hasattr(outside, "graph") else []
        elif tensor.op not in needed:
            needed.add(tensor.op)
            waiting += tensor.op.inputs
    return needed
