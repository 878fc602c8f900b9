"""Repeats a part of a graph on other inputs, perhaps in another graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import tree

# Parts of a functional model's graph, each of which runs as one function.
#
#     kinds:     a   a   b   a   a          b is what cannot be compiled, or is on another stage
#     levels:    0   0   1   2   2
#     segments: [a   a] [b] [a   a]
#
# A segment has all operations of one kind and level. An operation's level is the highest of those
# before it, and one more behind another kind, so that segments run in the order of their levels.


# A kind: that of what is before it.
INHERITED = object()


@dataclasses.dataclass
class Segment:
    """Part of a model's graph."""

    kind: Hashable
    operations: list[Any]
    function: keras.Function

    def run(self, found: dict[int, Any], run: Callable[[list[Any]], list[Any]]) -> None:
        """Computes its outputs.

        Args:
            found: Tensors by ids of the model's symbolic ones; outputs are added.
            run: Function of the list of inputs that returns the list of outputs.
        """
        outputs = tree.flatten(run([found[id(one)] for one in self.function.inputs]))
        found.update((id(one), output) for one, output in zip(self.function.outputs, outputs))


def nodes_in_order(function: Any) -> list[Any]:
    """Nodes of a graph's operations, each behind those that it needs."""
    given = {id(one) for one in function.inputs}
    return [
        node
        for depth in sorted(function._nodes_by_depth, reverse=True)
        for node in function._nodes_by_depth[depth]
        if not (node.is_input or all(id(one) in given for one in node.outputs))
    ]


def split(function: Any, kind_of: Callable[[Any], Hashable]) -> list[Segment]:
    """Cuts a graph into segments."""
    # By ids of tensors; what the graph is given has no place.
    places: dict[int, tuple[int, Hashable]] = {}
    members: dict[tuple[int, Hashable], list[Any]] = {}
    for node in nodes_in_order(function):
        before = [places[id(one)] for one in node.input_tensors if id(one) in places]
        kind = kind_of(node.operation)
        if kind is INHERITED:
            kind = max(before, key=lambda place: place[0])[1] if before else None
        level = max((level + (other != kind) for level, other in before), default=0)
        members.setdefault((level, kind), []).append(node)
        places.update((id(one), (level, kind)) for one in node.outputs)
    segments, last = [], {id(one): one for one in function.outputs}
    for place in sorted(members, key=lambda place: place[0]):
        nodes = members[place]
        made = {id(one): one for node in nodes for one in node.outputs}
        inputs = {id(t): t for node in nodes for t in node.input_tensors if id(t) not in made}
        used = {
            id(one)
            for other, others in members.items()
            if other != place
            for node in others
            for one in node.input_tensors
        }
        outputs = [one for key, one in made.items() if key in used or key in last]
        if inputs and outputs:
            part = keras.Function(list(inputs.values()), outputs)
            segments.append(Segment(place[1], [node.operation for node in nodes], part))
    return segments


# Functions called by operations of a graph, and the data flow in them.

ATTRIBUTES = ("f", "then_branch", "else_branch", "branches", "body", "cond")
# Whose first input is the condition.
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
_LOOPS = ("While", "StatelessWhile")


def nodes_of(operation: tf.Operation) -> Iterator[Any]:
    """Yields the `NodeDef`s of the functions that an operation calls, and of those they call."""
    waiting, seen = [operation.node_def], set()
    while waiting:
        for name in _names(waiting.pop()):
            if name not in seen:
                seen.add(name)
                nodes = _definition(operation.graph, name).node_def
                waiting.extend(nodes)
                yield from nodes


def dependent_outputs(operation: tf.Operation, inputs: Collection[int]) -> set[int]:
    """Numbers of an operation's outputs that depend on inputs, given by their numbers."""
    found = _dependent(operation.graph, operation.node_def, set(inputs))
    return set(range(len(operation.outputs))) if found is None else found


def _dependent(graph: tf.Graph, node: Any, inputs: set[int]) -> set[int] | None:
    """Numbers of a node's outputs that depend on inputs; None for all of them."""
    if not inputs:
        return set()
    if node.op in _BRANCHES and 0 in inputs:
        return None
    if node.op in _LOOPS:
        # A variable of the loop depends on others by way of the next turn.
        size = 0
        while len(inputs) > size:
            size = len(inputs)
            inputs = inputs | _dependent_in(graph, node.attr["body"].func.name, inputs)
        return inputs
    names = list(_names(node))
    if not names:
        return None
    offset = 1 if node.op in _BRANCHES else 0
    given = {i - offset for i in inputs}
    return set().union(*(_dependent_in(graph, name, given) for name in names))


def _dependent_in(graph: tf.Graph, name: str, inputs: set[int]) -> set[int]:
    """Numbers of a function's outputs that depend on some of its arguments."""
    definition = _definition(graph, name)
    arguments = [argument.name for argument in definition.signature.input_arg]
    # Names of nodes and arguments, with the numbers of outputs; None is for all.
    known: dict[str, set[int] | None] = {arguments[i]: None for i in inputs}
    is_changed = True
    while is_changed:
        is_changed = False
        for node in definition.node_def:
            used = [text for text in node.input if not text.startswith("^")]
            numbers = {i for i, text in enumerate(used) if _is_known(text, known)}
            found = _dependent(graph, node, numbers)
            if found != set() and known.get(node.name, ()) != found:
                known[node.name], is_changed = found, True
    outputs = [argument.name for argument in definition.signature.output_arg]
    return {i for i, one in enumerate(outputs) if _is_known(definition.ret[one], known)}


def _is_known(text: str, known: Mapping[str, set[int] | None]) -> bool:
    name, *rest = text.split(":")
    if name not in known:
        return False
    numbers = known[name]
    return numbers is None or int(rest[-1]) in numbers


def _names(node: Any) -> Iterator[str]:
    for attribute in ATTRIBUTES:
        if attribute in node.attr:
            value = node.attr[attribute]
            yield from filter(None, [value.func.name, *(one.name for one in value.list.func)])


def _definition(graph: tf.Graph, name: str) -> Any:
    return graph._get_function(name).cached_definition


_INPUTS = ("Placeholder", "PlaceholderWithDefault", "_Arg")


class Subgraph:
    """The operations between some tensors and others that are computed from them.

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
            outputs = dependent_outputs(operation, numbers)
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
    """Some operations, and all that they need; the list is used up."""
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
    if any(set(ATTRIBUTES) & set(node.attr) for node in nodes.node):
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
