"""Parts of a functional model's graph, each of which runs as one function.

    kinds:     a   a   b   a   a          b is what cannot be compiled, or is on another stage
    levels:    0   0   1   2   2
    segments: [a   a] [b] [a   a]

A segment has all operations of one kind and level. An operation's level is the highest of those
before it, and one more behind another kind, so that segments run in the order of their levels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import keras

from keras_psplus.keras_internals.keras_parts import tree

# A kind: that of what is before it.
INHERITED = object()


@dataclasses.dataclass
class Segment:
    """Part of a model's graph.

    Attributes:
        operations: Its operations, in their order.
    """

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
    """Cuts a graph into segments.

    Args:
        function: `keras.Function` or functional model.
        kind_of: Function of an operation that returns its kind, or `INHERITED`.

    Returns:
        List of segments, in an order in which they can run.
    """
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
