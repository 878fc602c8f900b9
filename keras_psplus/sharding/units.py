"""Units: layers whose weights are gathered together, and freed until backward.

A unit is the outermost layer that is called and no `keras.Model`: a Dense layer of a Sequential, a
block of a transformer; or one that `psp.unit` has made one. With units 1, 2 and 3, and each
gathering started by what is in brackets:

    forward     gather 1 [-]    gather 2 [-]     gather 3 [inputs of 2]
    backward    gather 3, gather 2 [gradient of 3's outputs]     gather 1 [gradient of 2's]

TensorFlow begins all that waits for nothing, and would gather the whole model at once. Small units
that follow each other are a group. It is gathered together in backward, and in forward if a
functional model says what follows: by itself each unit would cost more than its bytes. The second
gathering takes the place of the first in the operations of backward, which then is no longer needed
when forward is done.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.all_reduce.collectives.hop import Coding, buckets, row_of, wholes_of
from keras_psplus.core.batch.replica_step import TrafficVariables, current_step
from keras_psplus.core.graph.compiled_calls import CompiledFunction, graphs, is_in_gradient_of
from keras_psplus.engine import Call
from keras_psplus.keras_internals.keras_parts import get_keras_mask, set_keras_mask, tree
from keras_psplus.sharding.exchange import compressor_of, entries_of
from keras_psplus.sharding.weight import with_gradient
from keras_psplus.tf_internals import (
    control_flow_func_graphs,
    control_flow_util,
    framework_ops,
    record,
    resource_variable_ops,
)
from keras_psplus.updates.base import numbers_of

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.hop import Route
    from keras_psplus.compression import Compressor
    from keras_psplus.sharding.weight import PartOfWeight

# Operations whose gradients need shapes of these inputs alone, and those that keep values.
_NEED_NO_VALUE = {"AddV2": (0, 1), "BiasAdd": (1,), "GatherV2": (0,), "Sub": (0, 1)}
_CALLS = "PartitionedCall", "StatefulPartitionedCall"
_KEEP_VALUES = "Cast", "Identity", "Reshape"
# Size up to which units share a group.
_GROUP_BYTES = 1 << 20


class Units:
    """Gathers weights for the units of a strategy's steps.

    Args:
        bucket_bytes: Size in bytes up to which weights share a collective.
        frees: Whether weights are freed between forward and backward.
    """

    def __init__(
        self, route: Route, bucket_bytes: int, frees: bool, compressor: Compressor | None
    ) -> None:
        self._compressor = compressor
        self._route, self._bucket_bytes, self._frees = route, bucket_bytes, frees
        self._steps: weakref.WeakKeyDictionary[Any, StepCalls] = weakref.WeakKeyDictionary()
        self._plans: list[Plan] = []
        self._call: UnitCall | None = None
        self._now: dict[int, tf.Tensor] = {}
        self._backwards: list[Backward] = []
        # Ids of the weights that a graph's operations change, also by functions and branches.
        self._written: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
        self.traffic = TrafficVariables()

    def function(self, *args: Any) -> CompiledFunction:
        """Makes a compiled function, as `CompiledFunction` does, for the unit that is called."""
        call = self._call
        return CompiledFunction(*args) if call is None else UnitFunction(call.traces, *args)

    @property
    def is_in_call(self) -> bool:
        """Whether a unit is being called, or called once more for its compiled gradient."""
        return self._call is not None or self._of_gradient() is not None

    def read(self, weight: PartOfWeight) -> tf.Tensor:
        """The whole of a weight: what its unit has gathered, or gathered now."""
        given = given_by_calls(weight) if self._function_here() is None else None
        if given is None:
            return self.gathered(weight)
        resource_variable_ops.variable_accessed(weight)
        weight.record(given)
        return given

    def gathered(self, weight: PartOfWeight, is_kept: bool = False) -> tf.Tensor:
        """A gathered weight: the whole, or a part along an axis of the mesh.

        Args:
            is_kept: Whether backward computes with what is made of it here, and not with itself.
        """
        resource_variable_ops.variable_accessed(weight)
        call, function = self._call, self._function_here()
        if call is None or function is None:
            found = self._find(weight)
        else:
            # XLA cannot gather: the function takes what is gathered before its call.
            if id(weight) not in self._now:
                with call.graph.as_default():
                    self._now[id(weight)] = self._gather_to_compute([weight], ())[0]
            found = self._now[id(weight)]
            function.note_read(weight, found)
        if call is not None and is_kept:
            call.kept.add(id(weight))
        weight.record(found)
        return found

    def _function_here(self) -> UnitFunction | None:
        """The unit's function for XLA, where that is being traced."""
        return next((one for one in self._call.traces if one.is_here), None) if self._call else None

    def _find(self, weight: PartOfWeight) -> tf.Tensor:
        found = None
        if self._call is not None:
            found = self._now.get(id(weight))
        elif self._backwards:
            # In backward, where a layer is recomputed.
            found = self._backwards[-1].of_weight.get(id(weight))
        if found is not None and reaches(found.graph):
            return found
        of_gradient = self._of_gradient()
        if of_gradient is None:
            return self._gather_to_compute([weight], ())[0]
        # Weights that a compiled function computes with once more in backward.
        call, function = of_gradient
        again = (one.found.get(id(call), {}).get(id(weight)) for one in self._backwards)
        found = next((one for one in again if one is not None), function.whole_of(weight))
        if found is None:
            with call.graph.as_default():
                found = self._gather_to_compute([weight], ())[0]
        return found

    def _of_gradient(self) -> tuple[UnitCall, UnitFunction] | None:
        """The call and the compiled function whose gradient is being traced, or None."""
        calls = self._calls_of_step()
        pairs = ((call, one) for call in calls for one in call.traces if one.is_in_gradient)
        return next(pairs, None)

    def _calls_of_step(self) -> list[UnitCall]:
        step = current_step()
        groups = self._steps[step].groups if step in self._steps else []
        return [call for group in groups for call in group]

    def note_gradient(self) -> None:
        """Notes that a tape is asked for gradients, in a layer or a step."""
        for function in self._call.traces if self._call else ():
            if function.holds and function.refused is None:
                function.refused = "it computes gradients itself"

    def note_write(self, weight: PartOfWeight) -> None:
        """Notes that a weight changes: what was gathered before no longer stands for it."""
        if tf.executing_eagerly():
            return
        for function in self._call.traces if self._call else ():
            if function.holds:
                # It is not compiled, and traced again where the unit is called.
                function.refused = "it changes weights in shares"
                return
        for known in (self._now, *(plan.wholes for plan in self._plans)):
            known.pop(id(weight), None)
        for graph in graphs():
            self._written.setdefault(graph, set()).add(id(weight))
        for call in self._calls_of_step():
            # Backward is that of the values with which forward has computed.
            call.is_stale |= any(one is weight for one in call.weights)

    @contextlib.contextmanager
    def following(self, units: Sequence[list[PartOfWeight]]) -> Iterator[None]:
        """Context in which units are called, of which these are the weights, in this order."""
        self._plans.append(Plan(units))
        try:
            yield
        finally:
            self._plans.pop()

    def call(
        self, weights: Sequence[PartOfWeight], proceed: Callable[[Call], Any], of_layer: Call
    ) -> Any:
        """Calls a unit between the gathering of its weights, each once, and their release."""
        step = self._steps.setdefault(current_step(), StepCalls())
        most, graph = min(_GROUP_BYTES, self._bucket_bytes), framework_ops.get_default_graph()
        plan = next((one for one in self._plans[-1:] if one.graph is graph), Plan([]))
        if not all(id(one) in plan.wholes for one in weights):
            together = plan.take(weights, most)
            wholes = self._gather_to_compute(together, step.reasons())
            plan.wholes.update((id(one), whole) for one, whole in zip(together, wholes))
        given = tree.flatten((of_layer.args, of_layer.kwargs))
        inputs = [self.part_of(one) for one in given if isinstance(one, tf.Tensor)]
        call = UnitCall(weights, [plan.wholes[id(one)] for one in weights], inputs)
        number = step.add(call, most)
        before = len(call.graph.get_operations())
        self._call, self._now = call, {id(w): one for w, one in zip(weights, call.wholes)}
        try:
            outputs = proceed(of_layer)
        finally:
            self._call, self._now = None, {}
        is_in_step = all(whole.graph is call.graph for whole in call.wholes)
        if not (self._frees and is_in_step and record.could_possibly_record()):
            return outputs
        call.derived.note(call.graph.get_operations()[before:])
        return call.gated(
            outputs, self, lambda grads: self._gather_again(step, number, call, grads)
        )

    def part_of(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor that is computed of one between layers."""
        return tensor

    def whole_of(self, tensor: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
        """A tensor between layers, with another one in the place of its part."""
        return part

    def _gather_again(
        self, step: StepCalls, number: int, call: UnitCall, grads: list[tf.Tensor]
    ) -> None:
        """Gathers weights of a call's group and of that before, as gradients arrive."""
        if not self._backwards or framework_ops.get_default_graph() is not call.graph:
            return
        backward, reasons = self._backwards[-1], [*map(self.part_of, numbers_of(grads))]
        for i in [number] if number in step.starts else [number, number - 1]:
            group, is_last = step.groups[i], i == len(step.groups) - 1
            calls = [one for one in group if one.graph is call.graph and one.is_recorded]
            calls = [one for one in calls if not (one.is_stale or id(one) in backward.found)]
            # The last one's are still there: its backward comes next.
            needed = [[] if is_last else one.of_backward() for one in calls]
            weights = {id(weight): weight for some in needed for weight in some}
            again = dict(zip(weights, self._gather([*weights.values()], reasons)))
            for one, some in zip(calls, needed):
                backward.add(one, {id(weight): again[id(weight)] for weight in some})
            found = [backward.found.get(id(one), {}) for one in group]
            reasons = [*reasons, *(whole for one in found for whole in one.values())]

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Context in which a tape makes the operations of backward."""
        if tf.executing_eagerly() or not self._frees:
            yield
            return
        step = self._steps.setdefault(current_step(), StepCalls())
        step.starts.add(len(step.groups))
        self._backwards.append(Backward())
        try:
            yield
            self._backwards[-1].redirect()
        finally:
            self._backwards.pop()

    def _gather_to_compute(
        self, weights: Sequence[PartOfWeight], reasons: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Whole weights that have gradients, for all branches of conditions alike."""
        own = graph = framework_ops.get_default_graph()
        numbers = {id(one) for one in weights}
        while isinstance(graph, control_flow_func_graphs.CondBranchFuncGraph):
            if not numbers.isdisjoint(self._written.get(graph, ())):
                break
            graph = graph.outer_graph
        # Entering the current graph again would cut it off from its own devices.
        with contextlib.nullcontext() if graph is own else graph.as_default():
            reasons = [one for one in reasons if one.graph is graph]
            pairs = zip(self._gather(weights, reasons), weights)
            return [with_gradient(whole, weight) for whole, weight in pairs]

    def _gather(self, weights: Sequence[PartOfWeight], reasons: Sequence[tf.Tensor]) -> list[Any]:
        """Whole weights, by a collective for each bucket of a dtype."""
        wholes: list[Any] = [None] * len(weights)
        size = [one.place.parts.number * one.place.parts.width * one.dtype.size for one in weights]
        compressors = [compressor_of(self._compressor, one) for one in weights]
        with record.stop_recording(), tf.control_dependencies(reasons):
            kinds = [(w.dtype, id(c)) for w, c in zip(weights, compressors)]
            of_number = kinds.__getitem__, size.__getitem__
            for _, bucket in buckets(range(len(size)), *of_number, self._bucket_bytes):
                cuts = [weights[i].place.parts for i in bucket]
                row = row_of([tf.identity(weights[i].part.value()) for i in bucket])
                compressor = compressors[bucket[0]]
                # At any step alike: backward computes with what forward has computed with.
                coding = None if compressor is None else Coding(compressor, tf.zeros([], tf.int64))
                rows = self._route.gather(row, coding)
                for i, whole in zip(bucket, wholes_of(rows, cuts)):
                    wholes[i] = tf.ensure_shape(whole, cuts[bucket.index(i)].shape)
        self.count(weights, compressors)
        return wholes

    def count(
        self,
        weights: Sequence[PartOfWeight],
        compressors: Sequence[Compressor | None] | None = None,
    ) -> None:
        """Counts a gathering of weights."""
        widths = [one.place.parts.width for one in weights]
        self.traffic.add(entries_of(weights, widths, compressors, self._route, False))


class UnitCall:
    """One call of a unit in a step."""

    def __init__(
        self, weights: Sequence[PartOfWeight], wholes: list[tf.Tensor], inputs: list[Any]
    ) -> None:
        self.weights, self.wholes, self.inputs = weights, wholes, inputs
        self.graph = framework_ops.get_default_graph()
        self.is_recorded = False
        # Whether the step has changed some of the weights since.
        self.is_stale = False
        # Ids of weights of which backward computes with what was made of them in forward.
        self.kept: set[int] = set()
        self.derived = Derived(wholes)
        # Functions that were traced for XLA, also those that it cannot compile.
        self.traces: list[UnitFunction] = []

    @property
    def functions(self) -> list[UnitFunction]:
        """The compiled functions that it calls."""
        return [one for one in self.traces if one.operation is not None]

    def gated(self, outputs: Any, units: Units, arrive: Callable[[list[tf.Tensor]], None]) -> Any:
        """Outputs of which a function is told as soon as their gradients have come."""
        tensors = [leaf for leaf in tree.flatten(outputs) if isinstance(leaf, tf.Tensor)]
        of_kind = [one for one in tensors if one.dtype.is_floating or one.dtype.is_complex]
        inside = {id(one): units.part_of(one) for one in of_kind}
        if not inside:
            return outputs
        with record.stop_recording():
            gates = {key: tf.identity(part) for key, part in inside.items()}

        def gradient(*grads: Any) -> tuple[Any, ...]:
            arrive([one for one in grads if one is not None])
            return grads

        lists = [*gates.values()], [*inside.values()]
        record.record_operation("ShardedUnit", *lists, gradient)
        self.is_recorded = True
        outside = {id(one): units.whole_of(one, gates[id(one)]) for one in of_kind}
        for leaf in of_kind:
            if get_keras_mask(leaf) is not None:
                set_keras_mask(outside[id(leaf)], get_keras_mask(leaf))
        return tree.map_structure(lambda leaf: outside.get(id(leaf), leaf), outputs)

    def of_backward(self) -> list[PartOfWeight]:
        """Weights whose values backward needs: not biases, nor tables of rows."""
        calls = [one.operation for one in self.functions]

        def is_needed_of(whole: tf.Tensor) -> bool:
            inside = [one.captures[id(whole)] for one in self.functions if one.takes(whole)]
            return any(map(is_needed, inside)) or is_needed(whole, calls)

        pairs = [pair for pair in zip(self.weights, self.wholes) if id(pair[0]) not in self.kept]
        return [one for one, whole in pairs if is_needed_of(whole)]

    def replacements(self, again: Mapping[int, tf.Tensor]) -> Callable[[], dict[str, tf.Tensor]]:
        """Function that finds tensors by names of those whose places they take, after backward."""
        wholes = zip(self.weights, self.wholes)
        pairs = [(whole, again[id(one)]) for one, whole in wholes if id(one) in again]
        plain = self.derived.copied({old.name: new for old, new in pairs}, self.graph)
        inside = [(one, one.copied(pairs, self.graph)) for one in self.functions]

        def find() -> dict[str, tf.Tensor]:
            found = dict(plain)
            for function, own in inside:
                found.update(function.outside(own))
            return found

        return find


class StepCalls:
    """Calls of a step's units, in groups whose weights backward gathers together."""

    def __init__(self) -> None:
        self.groups: list[list[UnitCall]] = []
        # Numbers of the groups that are the first behind a backward, or in the step.
        self.starts = {0}

    def reasons(self) -> list[tf.Tensor]:
        """Tensors that the next gathering waits for."""
        last = self.groups[-1] if self.groups else []
        first = last[-1:] if len(self.groups) in self.starts else last[:1]
        tensors = [*(call.inputs for call in first), *(call.wholes for call in last)]
        return [one for some in tensors for one in some]

    def add(self, call: UnitCall, most: int) -> int:
        """Adds a call to a group of at most `most` bytes; returns its number."""
        size = sum(size_of(one.weights) for one in [*self.groups[-1], call]) if self.groups else 0
        if len(self.groups) in self.starts or size > most:
            self.groups.append([])
        self.groups[-1].append(call)
        return len(self.groups) - 1


class Plan:
    """Units that a model is about to call, and what was gathered of them.

    It counts for one call of the model: what updates behind that change, nobody may be told.

    Args:
        units: Weights of each, in order; none where what follows is not known.
    """

    def __init__(self, units: Sequence[Sequence[PartOfWeight]]) -> None:
        self._units, self.graph = list(units), framework_ops.get_default_graph()
        # Gathered tensors, by ids of the weights.
        self.wholes: dict[int, tf.Tensor] = {}

    def take(self, weights: Sequence[PartOfWeight], most: int) -> list[PartOfWeight]:
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
        """Notes what a unit has gathered once more, by ids of its weights."""
        self.found[id(call)] = again
        wholes = zip(call.weights, call.wholes)
        self.of_weight.update({id(one): again.get(id(one), first) for one, first in wholes})
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
        self._read: dict[int, tuple[PartOfWeight, tf.Tensor]] = {}
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

    def whole_of(self, weight: PartOfWeight) -> tf.Tensor | None:
        """The whole of a weight that it computes with, or None."""
        _, whole = self._read.get(id(weight), (None, None))
        return whole

    def note_read(self, weight: PartOfWeight, whole: tf.Tensor) -> None:
        """Notes that the function computes with what was gathered of a weight."""
        self._read[id(weight)] = weight, whole

    def why_not(self, device: str | None = None) -> str | None:
        return self.refused or super().why_not(device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graph = framework_ops.get_default_graph()
        for weight, whole in self._read.values():
            resource_variable_ops.variable_accessed(weight)
            weight.record(whole)
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
        if not isinstance(graph, control_flow_func_graphs.ControlFlowFuncGraph):
            return False
        graph = graph.outer_graph
    return True


def function_here() -> Any:
    """The function that is being traced, if one for XLA calls it; or None."""
    graph = framework_ops.get_default_graph()
    while isinstance(graph, control_flow_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
    # The call of a function for XLA marks the graph that it is made in.
    outer = getattr(graph, "outer_graph", None)
    is_for_xla = outer is not None and control_flow_util.GraphOrParentsInXlaContext(outer)
    return graph if is_for_xla else None


def given_by_calls(weight: PartOfWeight) -> tf.Tensor | None:
    """The whole of a weight, as each call of a function for XLA reads it.

    Steps share the functions of layers: what one step has gathered is of no use in another.

    Returns:
        The function's own tensor; None where none for XLA is being traced.
    """
    # Gradients of units have it from what has called these.
    if is_in_gradient_of(UnitFunction.kind):
        return None
    if is_in_gradient_of(*(f"{name}_" for name in weight.given_to)):
        raise ValueError(
            "`keras.remat` cannot gather weights inside of a function that XLA compiles: call the "
            "function in what `keras.remat` is given, or make it without `jit_compile=True`. "
            f"Received: a gradient that computes with '{weight.path}' once more"
        )
    function = function_here()
    if function is None:
        return None
    weight.given_to.add(function.name)
    captures, key = function.function_captures, ("whole weight", id(weight))
    if key not in captures.by_ref_internal:

        def read() -> tf.Tensor:
            with tf.control_dependencies(None):
                return weight.value()

        spec = tf.TensorSpec(weight.shape, weight.dtype)
        with tf.control_dependencies(None):
            function.capture_call_time_value(read, spec, key=key)
        # TensorFlow would have all functions around be given it, up to the step's own.
        captures.by_ref_external[key] = read
    whole: tf.Tensor = captures.by_ref_internal[key]
    return whole


def size_of(weights: Sequence[PartOfWeight]) -> int:
    """Bytes of what is gathered of weights."""
    return sum(math.prod(one.place.parts.shape) * one.dtype.size for one in weights)
