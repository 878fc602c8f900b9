"""Functions of units that XLA compiles, and operations that compute with weights alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.core.graph.compiled_function import CompiledFunction, graphs
from keras_psplus.core.graph.variables import record_read
from keras_psplus.tf_internals import (
    control_flow_func_graphs,
    framework_ops,
    resource_variable_ops,
)

if TYPE_CHECKING:
    from keras_psplus.sharding.weight import WeightShare

CONTROL_FLOW = (
    control_flow_func_graphs.CondBranchFuncGraph,
    control_flow_func_graphs.WhileBodyFuncGraph,
    control_flow_func_graphs.WhileCondFuncGraph,
)

# Operations whose gradients need shapes of these inputs alone, and those that keep values.
_NEED_NO_VALUE = {"AddV2": (0, 1), "BiasAdd": (1,), "GatherV2": (0,), "Sub": (0, 1)}
_CALLS = "PartitionedCall", "StatefulPartitionedCall"
_KEEP_VALUES = "Cast", "Identity", "Reshape"


class Derived:
    """Operations that compute with nothing but weights, such as casts, in order."""

    def __init__(self, weights: Iterable[tf.Tensor]) -> None:
        self._made = {weight.name for weight in weights}
        self._operations: list[tf.Operation] = []

    def note(self, operations: Iterable[tf.Operation]) -> None:
        """Adds those among some operations of a graph."""
        for op in operations:
            names = [one.name for one in op.inputs]
            if op._is_stateful or op.control_inputs or self._made.isdisjoint(names):
                continue
            if all(n in self._made or one.op.type == "Const" for n, one in zip(names, op.inputs)):
                self._operations.append(op)
                self._made.update(output.name for output in op.outputs)

    def copied(
        self,
        again: Mapping[str, tf.Tensor],
        graph: tf.Graph,
        kept: Mapping[str, tf.Tensor] | None = None,
    ) -> dict[str, tf.Tensor]:
        """Other weights, and what copies compute with them, by names of the first ones.

        Args:
            graph: Graph of the copies.
            kept: Tensors of that graph, by names of those of another one that are theirs.
        """
        found, kept = dict(again), kept or {}

        def copy(op: tf.Operation) -> list[tf.Tensor]:
            inputs = []
            for one in op.inputs:
                other = one if one.graph is graph else kept.get(one.name)
                other = found.get(one.name, other)
                inputs.append(copy(one.op)[one.value_index] if other is None else other)
            types, attributes = [output.dtype for output in op.outputs], op.node_def.attr
            attributes = {name: attributes[name] for name in attributes}
            return list(graph.create_op(op.type, inputs, types, attrs=attributes).outputs)

        for op in self._operations:
            if not found.keys().isdisjoint(one.name for one in op.inputs):
                found.update({old.name: new for old, new in zip(op.outputs, copy(op))})
        return found


class UnitFunction(CompiledFunction):
    """Function of a unit's tensors, and of whole weights, that XLA compiles.

    What backward needs of weights is among the function's outputs, as TensorFlow makes them, and is
    replaced there by what comes of the second gathering.

    Args:
        traces: List of the functions of a unit's call, of which this is one from its trace on.
        *args: As for `CompiledFunction`.

    Attributes:
        captures: The function's own tensors, by ids of those of the step that it takes.
        operation: The operation that calls it, or None.
        refused: A reason of the layers for which it is not compiled, or None.
    """

    kind = f"{CompiledFunction.kind}unit_"

    def __init__(self, traces: list[UnitFunction], *args: Any) -> None:
        self.operation: tf.Operation | None = None
        self.refused: str | None = None
        # Weights that it reads, and what was gathered of them.
        self._read: dict[int, tuple[WeightShare, tf.Tensor]] = {}
        traces.append(self)
        super().__init__(*args)
        self.captures = {id(outside): inside for outside, inside in self._graph.captures}
        wholes = [whole for _, whole in self._read.values() if self.takes(whole)]
        # Wholes of the step, by names of the function's own tensors.
        self._wholes = {self.captures[id(whole)].name: whole for whole in wholes}
        self._derived = Derived(self.captures[id(whole)] for whole in wholes)
        self._derived.note(self._graph.get_operations())

    @property
    def is_here(self) -> bool:
        """Whether operations that are made now are the function's own, and no inner function's."""
        return self._inside is not None and reaches(self._inside)

    @property
    def holds(self) -> bool:
        """Whether what is traced now is the function, or lies in it."""
        return any(graph is self._inside for graph in graphs())

    def whole_of(self, weight: WeightShare) -> tf.Tensor | None:
        """The whole of a weight that it computes with, or None."""
        _, whole = self._read.get(id(weight), (None, None))
        return whole

    def note_read(self, weight: WeightShare, whole: tf.Tensor) -> None:
        """Notes that the function computes with what was gathered of a weight."""
        self._read[id(weight)] = weight, whole

    def why_not(self, device: str | None = None) -> str | None:
        return self.refused or super().why_not(device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graph = framework_ops.get_default_graph()
        for weight, whole in self._read.values():
            resource_variable_ops.variable_accessed(weight)
            record_read(weight, whole)
        before = len(graph.get_operations())
        outputs = super().__call__(*args, **kwargs)
        self.operation = next(op for op in graph.get_operations()[before:] if op.type in _CALLS)
        return outputs

    def takes(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor of the step is among those that it takes beside its arguments."""
        return id(tensor) in self.captures

    def copied(
        self, pairs: Iterable[tuple[tf.Tensor, tf.Tensor]], graph: tf.Graph
    ) -> dict[str, tf.Tensor]:
        """Tensors by names of the function's own, of other whole weights.

        Args:
            pairs: Whole weights, and what takes their places.
            graph: Graph of the step.
        """
        own = {self.captures[id(old)].name: new for old, new in pairs if self.takes(old)}
        return self._derived.copied(own, graph, self._wholes)

    def outside(self, found: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """The same tensors by names of the outputs of the operation that calls the function."""
        assert self.operation is not None
        pairs = zip(self.operation.outputs, self._graph.outputs)
        return {output.name: found[own.name] for output, own in pairs if own.name in found}


def is_needed(tensor: tf.Tensor, apart_from: Sequence[tf.Operation] = ()) -> bool:
    """Whether gradients of what is computed with a tensor, but by some operations, need it."""
    for op in tensor.consumers():
        if op in apart_from:
            continue
        places = [i for i, one in enumerate(op.inputs) if one is tensor]
        if op.type in _KEEP_VALUES and places == [0]:
            if any(map(is_needed, op.outputs)):
                return True
        elif not set(places) <= set(_NEED_NO_VALUE.get(op.type, ())):
            return True
    return False


def reaches(home: tf.Graph) -> bool:
    """Whether the graph is of branches or loops of another, and no function."""
    graph = framework_ops.get_default_graph()
    while graph is not home:
        if not isinstance(graph, CONTROL_FLOW):
            return False
        graph = graph.outer_graph
    return True
