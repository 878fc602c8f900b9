"""Repeats a part of a graph on other inputs."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

_OF_VARIABLES = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
_INPUTS = ("Placeholder", "PlaceholderWithDefault")


class NotRepeatable(ValueError):
    """A tensor's computation must not be repeated, for the reason given."""


def repeat(tensor: tf.Tensor, sources: Mapping[Any, tf.Tensor]) -> tf.Tensor:
    """Repeats the operations between some tensors and one that is made of them.

    Args:
        tensor: Symbolic tensor.
        sources: Dict from references of tensors of the same graph to those in their place.

    Returns:
        Tensor in the same graph. What does not depend on the sources is not repeated.

    Raises:
        NotRepeatable: If there are operations with side effects among them, or variables.
    """
    if tensor.ref() in sources:
        return sources[tensor.ref()]
    operations = _operations_before(tensor, sources)
    for operation in operations:
        _check_repeatable(operation)
    depends, nodes, given = set(), tf.compat.v1.GraphDef(), {}
    for operation in operations:
        inputs = list(operation.inputs)
        if any(t.ref() in sources or t.op.name in depends for t in inputs):
            depends.add(operation.name)
            nodes.node.append(_node(operation))
            for t in inputs:
                if t.ref() in sources or t.op.name not in depends:
                    given[t.name] = sources.get(t.ref(), t)
    if tensor.op.name not in depends:
        return tensor
    nodes.versions.CopyFrom(tensor.graph.graph_def_versions)
    return tf.graph_util.import_graph_def(
        nodes, input_map=given, return_elements=[tensor.name], name="next_batch"
    )[0]


def _operations_before(tensor, sources):
    """Operations that a tensor is made by, each after those that it needs."""
    ordered, seen, stack = [], set(), [(tensor.op, False)]
    while stack:
        operation, is_done = stack.pop()
        if is_done:
            ordered.append(operation)
        elif operation.name not in seen:
            seen.add(operation.name)
            stack.append((operation, True))
            stack.extend((t.op, False) for t in operation.inputs if t.ref() not in sources)
    return ordered


def _check_repeatable(operation):
    kind = operation.type
    if kind in _INPUTS or kind.startswith("LookupTable") or not operation.op_def.is_stateful:
        return
    if kind in _OF_VARIABLES or kind.startswith("Rpc"):
        raise NotRepeatable("its ids depend on variables, or on rows of a table")
    raise NotRepeatable(f"its ids depend on an operation that is not to be run twice ({kind})")


def _node(operation):
    node = tf.compat.v1.NodeDef()
    node.CopyFrom(operation.node_def)
    # What is to be done before, checks for example, is done for the batch itself.
    inputs = [name for name in node.input if not name.startswith("^")]
    del node.input[:]
    node.input.extend(inputs)
    node.attr.pop("_class", None)
    return node
