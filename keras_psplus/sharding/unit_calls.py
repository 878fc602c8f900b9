"""Calls of units in a step, and their second gatherings in backward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.tf_internals import control_flow_func_graphs, framework_ops

if TYPE_CHECKING:
    from keras_psplus.sharding.weight import WeightShare

_CONTROL_FLOW = (
    control_flow_func_graphs.CondBranchFuncGraph,
    control_flow_func_graphs.WhileBodyFuncGraph,
    control_flow_func_graphs.WhileCondFuncGraph,
)

# Operations whose gradients need shapes of these inputs alone, and those that keep values.
_NEED_NO_VALUE = {"AddV2": (0, 1), "BiasAdd": (1,), "GatherV2": (0,), "Sub": (0, 1)}
_KEEP_VALUES = "Cast", "Identity", "Reshape"


class UnitCall:
    """One call of a unit in a step.

    Args:
        weights: The unit's `WeightShare`s, each once.
        wholes: What was gathered of them.
        inputs: Tensors that the call takes.
    """

    def __init__(
        self, weights: Sequence[WeightShare], wholes: list[tf.Tensor], inputs: list[Any]
    ) -> None:
        self.weights, self.wholes, self.inputs = weights, wholes, inputs
        self.graph = framework_ops.get_default_graph()
        self.is_recorded = False
        # Whether the step has changed some of the weights since.
        self.is_stale = False
        # Operations of weights alone, such as casts, in order.
        self._derived: list[tf.Operation] = []

    def of_backward(self) -> list[int]:
        """Numbers of the weights whose values backward needs: not biases, nor tables of rows."""
        return [i for i, whole in enumerate(self.wholes) if _is_needed(whole)]

    def note_derived(self, operations: Iterable[tf.Operation]) -> None:
        """Notes which of the call's operations compute with nothing but weights."""
        made = {whole.name for whole in self.wholes}
        for op in operations:
            names = [one.name for one in op.inputs]
            if op._is_stateful or op.control_inputs or made.isdisjoint(names):
                continue
            if all(n in made or one.op.type == "Const" for n, one in zip(names, op.inputs)):
                self._derived.append(op)
                made.update(output.name for output in op.outputs)

    def replacements(self, again: Mapping[int, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Tensors by the names of those whose places they take, of the second gathering."""
        found = {self.wholes[i].name: new for i, new in again.items()}
        for op in self._derived:
            if found.keys().isdisjoint(one.name for one in op.inputs):
                continue
            attributes = op.node_def.attr
            copy = self.graph.create_op(
                op.type,
                [found.get(one.name, one) for one in op.inputs],
                [output.dtype for output in op.outputs],
                attrs={name: attributes[name] for name in attributes},
            )
            found.update({old.name: new for old, new in zip(op.outputs, copy.outputs)})
        return found


class UnitGroup:
    """Calls of units that follow each other, whose weights backward gathers together.

    Args:
        before: The group before it in the step, or None.

    Attributes:
        is_last: Whether none comes behind it.
        is_over: Whether backward came behind it.
    """

    def __init__(self, before: UnitGroup | None) -> None:
        self.before, self.is_last, self.is_over = before, True, False
        if before is not None:
            before.is_last = False
        self.calls: list[UnitCall] = []

    @property
    def size(self) -> int:
        """Bytes of its weights."""
        return sum(size_of(call.weights) for call in self.calls)

    @property
    def reasons(self) -> list[tf.Tensor]:
        """Tensors that the next gathering waits for."""
        first = self.calls[-1] if self.is_over else self.calls[0]
        return [*first.inputs, *(one for call in self.calls for one in call.wholes)]


class Plan:
    """Units that a model is about to call, and what was gathered of them.

    It counts for one call of the model: what updates behind that change, nobody may be told.

    Args:
        units: Weights of each, in order; none where what follows is not known.

    Attributes:
        graph: The graph in which it counts.
        wholes: What was gathered, by ids of the weights.
    """

    def __init__(self, units: Sequence[Sequence[WeightShare]]) -> None:
        self._units, self.graph = list(units), framework_ops.get_default_graph()
        self.wholes: dict[int, tf.Tensor] = {}

    def find(self, weights: Sequence[WeightShare]) -> list[tf.Tensor] | None:
        """Wholes of a unit's weights, if all of them are there."""
        found = [self.wholes[id(one)] for one in weights if id(one) in self.wholes]
        return found if len(found) == len(weights) else None

    def take(self, weights: Sequence[WeightShare], most: int) -> list[WeightShare]:
        """Weights of a unit, and of those behind it, up to so many bytes."""
        own = {id(one) for one in weights}
        place = next((i for i, unit in enumerate(self._units) if {*map(id, unit)} == own), None)
        if place is None:
            return [*weights]
        self._units = self._units[place + 1 :]
        together, left = [*weights], most - size_of(weights)
        for unit in self._units:
            left -= size_of(unit)
            if not unit or left < 0:
                break
            together += unit
        return [*{id(one): one for one in together}.values()]


class Backward:
    """The second gatherings of one call of a tape."""

    def __init__(self) -> None:
        self.found: dict[int, dict[int, tf.Tensor]] = {}
        self.of_weight: dict[int, tf.Tensor] = {}
        # Replacements for operations that are made after so many.
        self._replacements: list[tuple[int, dict[str, tf.Tensor]]] = []
        self._graph = framework_ops.get_default_graph()

    def add(self, call: UnitCall, again: dict[int, tf.Tensor]) -> None:
        """Notes what a unit has gathered once more, by numbers of its weights."""
        self.found[id(call)] = again
        wholes = [again.get(i, first) for i, first in enumerate(call.wholes)]
        self.of_weight.update({id(w): one for w, one in zip(call.weights, wholes)})
        replacements = call.replacements(again)
        self._replacements.append((len(self._graph.get_operations()), replacements))

    def redirect(self) -> None:
        """Has operations of backward compute with the second gatherings."""
        if not self._replacements:
            return
        operations, known = self._graph.get_operations(), dict[str, tf.Tensor]()
        # Operations made before a gathering keep to the first: they may come before its reasons.
        ends = [number for number, _ in self._replacements[1:]] + [len(operations)]
        for (begin, replacements), end in zip(self._replacements, ends):
            known.update(replacements)
            for op in operations[begin:end]:
                for i, one in enumerate(op.inputs):
                    if one.name in known:
                        op._update_input(i, known[one.name])


def size_of(weights: Sequence[WeightShare]) -> int:
    """Bytes of whole weights."""
    return sum(math.prod(one.shape) * one.dtype.size for one in weights)


def _is_needed(tensor: tf.Tensor) -> bool:
    """Whether gradients of what is computed with a tensor need its value."""
    for op in tensor.consumers():
        places = [i for i, one in enumerate(op.inputs) if one is tensor]
        if op.type in _KEEP_VALUES and places == [0]:
            if any(map(_is_needed, op.outputs)):
                return True
        elif not set(places) <= set(_NEED_NO_VALUE.get(op.type, ())):
            return True
    return False


def reaches(home: tf.Graph) -> bool:
    """Whether the graph is of branches or loops of another, and no function."""
    graph = framework_ops.get_default_graph()
    while graph is not home:
        if not isinstance(graph, _CONTROL_FLOW):
            return False
        graph = graph.outer_graph
    return True
