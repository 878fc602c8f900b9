"""Calls of units in a step, and their second gatherings in backward."""

from __future__ import annotations

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
        before: The group before it in a forward pass, if it is not the first.

    Attributes:
        is_last: Whether none comes behind it.
        is_over: Whether its forward pass is.
        wholes: What was gathered, by ids of the weights.
        size: Bytes of it.
    """

    def __init__(self, before: UnitGroup | None) -> None:
        self.before, self.is_last, self.is_over = before, True, False
        if before is not None:
            before.is_last = False
        self.size, self.wholes = 0, dict[int, tf.Tensor]()
        self.calls: list[UnitCall] = []

    def find(self, weights: Sequence[WeightShare]) -> list[tf.Tensor] | None:
        """Wholes of weights, if it has all of them for the current graph."""
        found = [self.wholes.get(id(one)) for one in weights]
        return found if all(one is not None and reaches(one.graph) for one in found) else None


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
        # What was made before a gathering keeps to the first: it may come before its reasons.
        ends = [number for number, _ in self._replacements[1:]] + [len(operations)]
        for (begin, replacements), end in zip(self._replacements, ends):
            known.update(replacements)
            for op in operations[begin:end]:
                for i, one in enumerate(op.inputs):
                    if one.name in known:
                        op._update_input(i, known[one.name])


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
