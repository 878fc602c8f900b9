"""Calls of units in a step, and their second gatherings in backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.sharding.units.functions import Derived, UnitFunction, is_needed
from keras_psplus.tf_internals import framework_ops

if TYPE_CHECKING:
    from keras_psplus.sharding.weight import WeightShare


class UnitCall:
    """One call of a unit in a step.

    Args:
        weights: The unit's `WeightShare`s, each once.
        wholes: What was gathered of them.
    """

    def __init__(
        self, weights: Sequence[WeightShare], wholes: list[tf.Tensor], inputs: list[Any]
    ) -> None:
        self.weights, self.wholes, self.inputs = weights, wholes, inputs
        self.graph = framework_ops.get_default_graph()
        self.is_recorded = False
        # Whether the step has changed some of the weights since.
        self.is_stale = False
        self._derived = Derived(wholes)
        # Functions that were traced for XLA, also those that it cannot compile.
        self.traces: list[UnitFunction] = []

    @property
    def functions(self) -> list[UnitFunction]:
        """The compiled functions that it calls."""
        return [one for one in self.traces if one.operation is not None]

    def of_backward(self) -> list[int]:
        """Numbers of the weights whose values backward needs: not biases, nor tables of rows."""
        functions = self.functions
        calls = [one.operation for one in functions]

        def is_needed_of(whole: tf.Tensor) -> bool:
            inside = [one.captures[id(whole)] for one in functions if one.takes(whole)]
            return any(map(is_needed, inside)) or is_needed(whole, calls)

        return [i for i, whole in enumerate(self.wholes) if is_needed_of(whole)]

    def note_derived(self, operations: Iterable[tf.Operation]) -> None:
        """Notes which of the call's operations compute with nothing but weights."""
        self._derived.note(operations)

    def replacements(self, again: Mapping[int, tf.Tensor]) -> Callable[[], dict[str, tf.Tensor]]:
        """Tensors by the names of those whose places they take, of the second gathering.

        Returns:
            Function that finds them, once backward is made.
        """
        pairs = [(self.wholes[i], new) for i, new in again.items()]
        plain = self._derived.copied({old.name: new for old, new in pairs}, self.graph)
        inside = [(one, one.copied(pairs, self.graph)) for one in self.functions]

        def find() -> dict[str, tf.Tensor]:
            found = dict(plain)
            for function, own in inside:
                found.update(function.outside(own))
            return found

        return find


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
        self._replacements: list[tuple[int, Callable[[], dict[str, tf.Tensor]]]] = []
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
            known.update(replacements())
            for op in operations[begin:end]:
                for i, one in enumerate(op.inputs):
                    if one.name in known:
                        op._update_input(i, known[one.name])


def size_of(weights: Sequence[WeightShare]) -> int:
    """Bytes of whole weights."""
    return sum(math.prod(one.shape) * one.dtype.size for one in weights)
