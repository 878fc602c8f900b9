"""Units: layers whose weights are gathered together, and freed until backward.

A unit is the outermost layer that is called and no `keras.Model`: a Dense layer of a Sequential, a
block of a transformer; or one that `psp.unit` has made one. With units 1, 2 and 3, and each
gathering started by what is in brackets:

    forward     gather 1 [-]    gather 2 [-]     gather 3 [inputs of 2]
    backward    gather 3, gather 2 [gradient of 3's outputs]     gather 1 [gradient of 2's]

TensorFlow begins all that waits for nothing, and would gather the whole model at once. The second
gathering takes the place of the first in the operations of backward, which then is no longer
needed when forward is done.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.all_reduce.collectives import gradients
from keras_psplus.all_reduce.reduction import row_routes
from keras_psplus.all_reduce.topology import shards
from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.core.batch.traffic import TrafficVariables
from keras_psplus.engine import Call
from keras_psplus.keras_internals.keras_parts import get_keras_mask, set_keras_mask, tree
from keras_psplus.sharding.exchange import compressor_of, entries_of
from keras_psplus.tf_internals import control_flow_func_graphs, framework_ops, record
from keras_psplus.updates.values import numbers_of

if TYPE_CHECKING:
    from keras_psplus.all_reduce.topology.part_routes import Route
    from keras_psplus.compression import Compressor
    from keras_psplus.sharding.weight import WeightShare

_CONTROL_FLOW = (
    control_flow_func_graphs.CondBranchFuncGraph,
    control_flow_func_graphs.WhileBodyFuncGraph,
    control_flow_func_graphs.WhileCondFuncGraph,
)
# Units that are gathered before they are needed.
_AHEAD = 1


class UnitCall:
    """One call of a unit in a step.

    Args:
        weights: The unit's `WeightShare`s, each once.
        number: Number of the call in its step.
    """

    def __init__(self, weights: Sequence[WeightShare], inputs: list[Any], number: int) -> None:
        self.weights, self.inputs, self.number = weights, inputs, number
        self.graph = framework_ops.get_default_graph()
        self.wholes: list[tf.Tensor] = []
        self.is_recorded = False
        # Whether the step has changed some of the weights since.
        self.is_stale = False
        # Operations of weights alone, such as casts, in order.
        self._derived: list[tf.Operation] = []

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

    def replacements(self, again: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """Tensors by the names of those whose places they take, of the second gathering."""
        found = {old.name: new for old, new in zip(self.wholes, again)}
        for op in self._derived:
            attributes = op.node_def.attr
            copy = self.graph.create_op(
                op.type,
                [found.get(one.name, one) for one in op.inputs],
                [output.dtype for output in op.outputs],
                attrs={name: attributes[name] for name in attributes},
            )
            found.update({old.name: new for old, new in zip(op.outputs, copy.outputs)})
        return found


class Backward:
    """The second gatherings of one call of a tape."""

    def __init__(self) -> None:
        self.found: dict[int, list[tf.Tensor]] = {}
        self.of_weight: dict[int, tf.Tensor] = {}
        # Replacements for operations that are made after so many.
        self._replacements: list[tuple[int, dict[str, tf.Tensor]]] = []
        self._graph = framework_ops.get_default_graph()

    def add(self, call: UnitCall, again: list[tf.Tensor]) -> None:
        """Notes what a unit has gathered once more."""
        self.found[id(call)] = again
        self.of_weight.update({id(w): one for w, one in zip(call.weights, again)})
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


class Units:
    """Gathers weights for the units of a strategy's steps.

    Args:
        route: Way of rows between the workers that share.
        bucket_bytes: Size in bytes up to which weights share a collective.
        frees: Whether weights are freed between forward and backward.
        compressor: `Compressor` of the values that are gathered, or None.
    """

    def __init__(
        self, route: Route, bucket_bytes: int, frees: bool, compressor: Compressor | None
    ) -> None:
        self._compressor = compressor
        self._route, self._bucket_bytes, self._frees = route, bucket_bytes, frees
        self._calls: weakref.WeakKeyDictionary[Any, list[UnitCall]] = weakref.WeakKeyDictionary()
        self._call: UnitCall | None = None
        self._now: dict[int, tf.Tensor] = {}
        self._backwards: list[Backward] = []
        # Ids of the weights that a graph's operations change, also by functions and branches.
        self._written: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
        self.traffic = TrafficVariables()

    @property
    def is_in_call(self) -> bool:
        """Whether a unit is being called."""
        return self._call is not None

    def read(self, weight: WeightShare) -> tf.Tensor:
        """The whole of a weight: what its unit has gathered, or gathered now."""
        found = None
        if self._call is not None:
            found = self._now.get(id(weight))
        elif self._backwards:
            # In backward, where a layer is recomputed.
            found = self._backwards[-1].of_weight.get(id(weight))
        if found is None or not reaches(found.graph):
            return self._gather_to_compute([weight], ())[0]
        return found

    def note_write(self, weight: WeightShare) -> None:
        """Notes that a weight changes: what was gathered before no longer stands for it."""
        if tf.executing_eagerly():
            return
        self._now.pop(id(weight), None)
        graph = framework_ops.get_default_graph()
        while graph is not None:
            self._written.setdefault(graph, set()).add(id(weight))
            graph = getattr(graph, "outer_graph", None)
        step = current_step()
        for call in () if step is None else self._calls.get(step, ()):
            # Backward is that of the values with which forward has computed.
            call.is_stale |= any(one is weight for one in call.weights)

    def call(
        self, weights: Sequence[WeightShare], proceed: Callable[[Call], Any], of_layer: Call
    ) -> Any:
        """Calls a unit between the gathering of its weights and their release.

        Args:
            weights: Its weights, each once.
            proceed: Function that makes the call.
        """
        calls = self._calls.setdefault(current_step(), [])
        given = tree.flatten((of_layer.args, of_layer.kwargs))
        inputs = [one for one in given if isinstance(one, tf.Tensor)]
        call = UnitCall(weights, inputs, len(calls))
        call.wholes = self._gather_to_compute(weights, self._reasons(calls))
        calls.append(call)
        before = len(call.graph.get_operations())
        self._call, self._now = call, {id(w): one for w, one in zip(weights, call.wholes)}
        try:
            outputs = proceed(of_layer)
        finally:
            self._call, self._now = None, {}
        is_in_step = all(whole.graph is call.graph for whole in call.wholes)
        if not (self._frees and is_in_step and record.could_possibly_record()):
            return outputs
        call.note_derived(call.graph.get_operations()[before:])
        return self._gated(call, outputs)

    def _reasons(self, calls: list[UnitCall]) -> Sequence[tf.Tensor]:
        """Tensors that the gathering of a call waits for."""
        return [*calls[-_AHEAD].inputs, *calls[-1].wholes] if len(calls) >= _AHEAD else ()

    def _gated(self, call: UnitCall, outputs: Any) -> Any:
        """Outputs whose gradients have the unit's weights gathered once more."""
        inside = list(
            {id(leaf): leaf for leaf in tree.flatten(outputs) if _has_gradient(leaf)}.values()
        )
        if not inside:
            return outputs
        with record.stop_recording():
            outside = [tf.identity(leaf) for leaf in inside]
        for old, new in zip(inside, outside):
            if get_keras_mask(old) is not None:
                set_keras_mask(new, get_keras_mask(old))

        def gradient(*grads: Any) -> tuple[Any, ...]:
            self._arrive(call, [one for one in grads if one is not None])
            return grads

        record.record_operation("ShardedUnit", outside, inside, gradient)
        call.is_recorded = True
        pairs = {id(old): new for old, new in zip(inside, outside)}
        return tree.map_structure(lambda leaf: pairs.get(id(leaf), leaf), outputs)

    def _arrive(self, call: UnitCall, grads: list[Any]) -> None:
        """Gathers weights once more, as the gradients of a unit's outputs have come."""
        if not self._backwards or framework_ops.get_default_graph() is not call.graph:
            return
        backward, reasons = self._backwards[-1], numbers_of(grads)
        calls = self._calls.get(current_step(), [call])
        for one in reversed(calls[max(0, call.number - _AHEAD) : call.number + 1]):
            may = one.graph is call.graph and one.is_recorded and not one.is_stale
            if may and id(one) not in backward.found:
                backward.add(one, self._gather(one.weights, reasons))
            reasons = [*reasons, *backward.found.get(id(one), ())]

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Context in which a tape makes the operations of backward."""
        if tf.executing_eagerly() or not self._frees:
            yield
            return
        self._backwards.append(Backward())
        try:
            yield
            self._backwards[-1].redirect()
        finally:
            self._backwards.pop()

    def _gather_to_compute(
        self, weights: Sequence[WeightShare], reasons: Sequence[tf.Tensor]
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
            return [_with_gradient(whole, weight) for whole, weight in pairs]

    def _gather(self, weights: Sequence[WeightShare], reasons: Sequence[tf.Tensor]) -> list[Any]:
        """Whole weights, by a collective for each bucket of a dtype."""
        wholes: list[Any] = [None] * len(weights)
        size = [one.place.parts.number * one.place.parts.width * one.dtype.size for one in weights]
        compressors = [compressor_of(self._compressor, one) for one in weights]
        with record.stop_recording(), tf.control_dependencies(reasons):
            kinds, numbers = (
                [(w.dtype, id(c)) for w, c in zip(weights, compressors)],
                range(len(size)),
            )
            of_number = kinds.__getitem__, size.__getitem__
            for _, bucket in gradients.buckets(numbers, *of_number, self._bucket_bytes):
                cuts = [weights[i].place.parts for i in bucket]
                row = shards.row_of([tf.identity(weights[i].part.value()) for i in bucket])
                rows = self._gather_row(row, compressors[bucket[0]])
                for i, whole in zip(bucket, shards.wholes_of(rows, cuts)):
                    wholes[i] = tf.ensure_shape(whole, cuts[bucket.index(i)].shape)
        cuts = [one.place.parts for one in weights]
        widths = [cut.width for cut in cuts]
        self.traffic.add(entries_of(weights, widths, compressors, self._route, False))
        return wholes

    def _gather_row(self, row: tf.Tensor, compressor: Compressor | None) -> tf.Tensor:
        """All workers' rows; as they are decoded if there is a compressor."""
        if compressor is None:
            return self._route.gather(row)
        # At any step alike: backward computes with what forward has computed with.
        wide, step = tf.cast(row, tf.float32), tf.zeros([], tf.int64)
        hop = self._route.launcher, 0, self._route.size
        rows, _, _ = row_routes.gather_row(*hop, compressor, wide, (), step)
        return self._route.gather_within(tf.cast(rows, row.dtype))


@tf.RegisterGradient("ShardedRead")
def _gradient_of_read(op: tf.Operation, grad: tf.Tensor, _: Any) -> tuple[None, tf.Tensor]:
    if isinstance(op.graph, control_flow_func_graphs.WhileBodyFuncGraph):
        raise ValueError(
            'With `shard="all"`, `tf.while_loop` has no gradients of weights its body gathers. '
            "Put the loop into the `call` of a layer, whose weights are gathered before it. "
            f"Received: the body '{op.graph.name}'"
        )
    return None, grad


def _with_gradient(whole: tf.Tensor, weight: WeightShare) -> tf.Tensor:
    """A whole weight whose gradient is the weight's, also in a function within the step.

    What calls such a function differentiates its operations, of which no tape has a record.
    """
    graph = framework_ops.get_default_graph()
    with record.stop_recording(), graph.gradient_override_map({"IdentityN": "ShardedRead"}):
        read: tf.Tensor = tf.raw_ops.IdentityN(input=[whole, weight.handle])[0]
    return read


def reaches(home: tf.Graph) -> bool:
    """Whether the graph is of branches or loops of another, and no function."""
    graph = framework_ops.get_default_graph()
    while graph is not home:
        if not isinstance(graph, _CONTROL_FLOW):
            return False
        graph = graph.outer_graph
    return True


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and (leaf.dtype.is_floating or leaf.dtype.is_complex)
