"""Repeats a part of a graph on other inputs, perhaps in another graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_psplus.core.graph import called_functions

_INPUTS = ("Placeholder", "PlaceholderWithDefault", "_Arg")


class Subgraph:
    """The operations between some tensors and others that are computed from them.

    Args:
        tensors: Symbolic tensors of one graph.
        sources: Tensors of that graph.

    Attributes:
        operations: Operations that depend on a source, each after those that it needs.
        inputs: What these operations need besides sources and constants.
    """

    def __init__(self, tensors: Sequence[tf.Tensor], sources: Sequence[tf.Tensor]) -> None:
        self._tensors, known = list(tensors), {source.ref() for source in sources}
        self._moved, constants = set(known), set()
        self.operations: list[tf.Operation] = []
        for operation in operations_before(tensors, known):
            given = list(operation.inputs)
            numbers = [i for i, t in enumerate(given) if t.ref() in self._moved]
            outputs = called_functions.dependent_outputs(operation, numbers)
            if outputs:
                self.operations.append(operation)
                self._moved |= {operation.outputs[i].ref() for i in outputs}
            elif _is_pure(operation) and all(t.op.name in constants for t in given):
                constants.add(operation.name)
        found = {t.ref(): t for one in self.operations for t in one.inputs if not self.has(t)}
        self.inputs = [t for t in found.values() if t.op.name not in constants]
        # They may be wanted in another graph.
        wanted = [t for t in found.values() if t.op.name in constants]
        self._constants = operations_before(wanted, ())

    def has(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is a source or depends on one."""
        return tensor.ref() in self._moved

    def repeat(self, values: Mapping[Any, tf.Tensor], name: str) -> list[tf.Tensor]:
        """Repeats the operations.

        Args:
            values: Dict from references of sources, and of `inputs` that are to be replaced, to
                tensors of the present graph.
            name: Name scope of the new operations.

        Returns:
            List like `tensors`. One that depends on no source is as it was.
        """
        found = [values.get(tensor.ref(), tensor) for tensor in self._tensors]
        moved = [i for i, t in enumerate(self._tensors) if self.has(t) and t.ref() not in values]
        if not moved:
            return found
        graph, nodes = self._tensors[moved[0]].graph, tf.compat.v1.GraphDef()
        copied = [*self._constants, *self.operations]
        nodes.node.extend(_node(operation) for operation in copied)
        nodes.versions.CopyFrom(graph.graph_def_versions)
        if graph is not tf.compat.v1.get_default_graph():
            _move(nodes, graph)
        inside = {operation.name for operation in copied}
        needed = [t for one in self.operations for t in one.inputs]
        given = {
            t.name: values.get(t.ref(), t)
            for t in needed
            if t.ref() in values or t.op.name not in inside
        }
        names = [self._tensors[i].name for i in moved]
        # An import cannot have the control inputs of the present context.
        with tf.control_dependencies(None):
            new = tf.graph_util.import_graph_def(
                nodes, input_map=given, return_elements=names, name=name
            )
        for i, tensor in zip(moved, new):
            found[i] = tensor
        return found


def operations_before(tensors: Sequence[tf.Tensor], sources: Any) -> list[tf.Operation]:
    """Operations that compute tensors, each after those that it needs.

    Args:
        tensors: Symbolic tensors of one graph.
        sources: References of tensors whose operations are left out.
    """
    ordered, seen = [], set()
    stack = [(tensor.op, False) for tensor in tensors if tensor.ref() not in sources]
    while stack:
        operation, is_done = stack.pop()
        if is_done:
            ordered.append(operation)
        elif operation.name not in seen:
            seen.add(operation.name)
            stack.append((operation, True))
            stack.extend((t.op, False) for t in operation.inputs if t.ref() not in sources)
    return ordered


def with_inputs(waiting: list[tf.Operation]) -> set[tf.Operation]:
    """Some operations, and all that they need.

    Args:
        waiting: List of operations, which is used up.
    """
    found = set()
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting += [tensor.op for tensor in op.inputs]
            waiting += op.control_inputs
    return found


def _is_pure(operation: tf.Operation) -> bool:
    return operation.type not in _INPUTS and not operation.op_def.is_stateful


def _move(nodes: tf.compat.v1.GraphDef, graph: tf.Graph) -> None:
    """Has nodes of one graph fit into another."""
    for node in nodes.node:
        node.device = ""
    if any(set(called_functions.ATTRIBUTES) & set(node.attr) for node in nodes.node):
        nodes.library.CopyFrom(graph.as_graph_def().library)


def _node(operation: tf.Operation) -> tf.compat.v1.NodeDef:
    node = tf.compat.v1.NodeDef()
    node.CopyFrom(operation.node_def)
    # Control inputs, such as checks, have run before.
    inputs = [name for name in node.input if not name.startswith("^")]
    del node.input[:]
    node.input.extend(inputs)
    node.attr.pop("_class", None)
    return node
