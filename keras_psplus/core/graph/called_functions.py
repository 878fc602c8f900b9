"""Functions called by operations of a graph, and the data flow in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import tensorflow as tf

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
    """The numbers of an operation's outputs that depend on some of its inputs.

    Args:
        inputs: Numbers of inputs.
    """
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
