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
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.all_reduce.collectives import gradients
from keras_psplus.all_reduce.reduction import routes
from keras_psplus.all_reduce.topology import shards
from keras_psplus.core.batch.replica_step import TrafficVariables, current_step
from keras_psplus.core.graph.compiled_function import CompiledFunction
from keras_psplus.core.graph.variables import record_read
from keras_psplus.engine import Call
from keras_psplus.keras_internals.keras_parts import get_keras_mask, set_keras_mask, tree
from keras_psplus.sharding.exchange import compressor_of, entries_of
from keras_psplus.sharding.units.calls import Backward, Plan, UnitCall, UnitGroup, size_of
from keras_psplus.sharding.units.functions import UnitFunction, reaches
from keras_psplus.sharding.units.xla_reads import given_by_calls
from keras_psplus.tf_internals import (
    control_flow_func_graphs,
    framework_ops,
    record,
    resource_variable_ops,
)
from keras_psplus.updates.base import numbers_of

if TYPE_CHECKING:
    from keras_psplus.all_reduce.topology.shards import Route
    from keras_psplus.compression import Compressor
    from keras_psplus.sharding.weight import WeightShare

# Size up to which units share a group.
_GROUP_BYTES = 1 << 20


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
        self._groups: weakref.WeakKeyDictionary[Any, list[UnitGroup]] = weakref.WeakKeyDictionary()
        self._plans: list[Plan] = []
        self._call: UnitCall | None = None
        self._now: dict[int, tf.Tensor] = {}
        self._backwards: list[Backward] = []
        # Ids of the weights that a graph's operations change, also by functions and branches.
        self._written: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
        self.traffic = TrafficVariables()

    @property
    def _most_together(self) -> int:
        return min(_GROUP_BYTES, self._bucket_bytes)

    def function(self, *args: Any) -> CompiledFunction:
        """Makes a compiled function, as `CompiledFunction` does, for the unit that is called."""
        call = self._call
        return CompiledFunction(*args) if call is None else UnitFunction(call.traces, *args)

    @property
    def is_in_call(self) -> bool:
        """Whether a unit is being called, or called once more for its compiled gradient."""
        return self._call is not None or self._of_gradient() is not None

    def read(self, weight: WeightShare) -> tf.Tensor:
        """The whole of a weight: what its unit has gathered, or gathered now."""
        resource_variable_ops.variable_accessed(weight)
        call = self._call
        function = next((one for one in call.traces if one.is_here), None) if call else None
        if call is None or function is None:
            given = given_by_calls(weight)
            whole = self._find(weight) if given is None else given
        else:
            # XLA cannot gather: the function takes what is gathered before its call.
            if id(weight) not in self._now:
                with call.graph.as_default():
                    self._now[id(weight)] = self._gather_to_compute([weight], ())[0]
            whole = self._now[id(weight)]
            function.note_read(weight, whole)
        record_read(weight, whole)
        return whole

    def _find(self, weight: WeightShare) -> tf.Tensor:
        found = None
        if self._call is not None:
            found = self._now.get(id(weight))
        elif self._backwards:
            # In backward, where a layer is recomputed.
            found = self._backwards[-1].of_weight.get(id(weight))
        if found is not None and reaches(found.graph):
            return found
        of_gradient = self._of_gradient()
        if of_gradient is not None:
            return self._found_for_gradient(weight, *of_gradient)
        return self._gather_to_compute([weight], ())[0]

    def _of_gradient(self) -> tuple[UnitCall, UnitFunction] | None:
        """The call and the compiled function whose gradient is being traced, or None."""
        step = current_step()
        calls = [c for group in self._groups.get(step, ()) for c in group.calls] if step else []
        pairs = ((call, one) for call in calls for one in call.traces if one.is_in_gradient)
        return next(pairs, None)

    def _found_for_gradient(
        self, weight: WeightShare, call: UnitCall, function: UnitFunction
    ) -> tf.Tensor:
        """The whole of a weight, for what a compiled function computes once more in backward."""
        number = next((i for i, one in enumerate(call.weights) if one is weight), -1)
        for backward in self._backwards:
            again = backward.found.get(id(call), {}).get(number)
            if again is not None:
                return again
        found = function.whole_of(weight)
        if found is None:
            with call.graph.as_default():
                found = self._gather_to_compute([weight], ())[0]
        return found

    def note_gradient(self) -> None:
        """Notes that a tape is asked for gradients, in a layer or a step."""
        for function in self._call.traces if self._call else ():
            if function.holds and function.refused is None:
                function.refused = "it computes gradients itself"

    def note_write(self, weight: WeightShare) -> None:
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
        graph = framework_ops.get_default_graph()
        while graph is not None:
            self._written.setdefault(graph, set()).add(id(weight))
            graph = getattr(graph, "outer_graph", None)
        step = current_step()
        for group in () if step is None else self._groups.get(step, ()):
            for call in group.calls:
                # Backward is that of the values with which forward has computed.
                call.is_stale |= any(one is weight for one in call.weights)

    @contextlib.contextmanager
    def following(self, units: Sequence[list[WeightShare]]) -> Iterator[None]:
        """Context in which units are called, of which these are the weights, in this order."""
        self._plans.append(Plan(units))
        try:
            yield
        finally:
            self._plans.pop()

    def call(
        self, weights: Sequence[WeightShare], proceed: Callable[[Call], Any], of_layer: Call
    ) -> Any:
        """Calls a unit between the gathering of its weights and their release.

        Args:
            weights: Its weights, each once.
        """
        given = tree.flatten((of_layer.args, of_layer.kwargs))
        inputs = [one for one in given if isinstance(one, tf.Tensor)]
        groups = self._groups.setdefault(current_step(), [])
        last = groups[-1] if groups else None
        call = UnitCall(weights, self._wholes_of(weights, last), inputs)
        if last is None or last.is_over or last.size + size_of(weights) > self._most_together:
            groups.append(UnitGroup(last))
        group = groups[-1]
        group.calls.append(call)
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
        return self._gated(group, call, outputs)

    def _wholes_of(self, weights: Sequence[WeightShare], last: UnitGroup | None) -> list[tf.Tensor]:
        """Whole weights of a unit that is called: planned ones, or gathered now."""
        graph = framework_ops.get_default_graph()
        plan = next((one for one in self._plans[-1:] if one.graph is graph), Plan([]))
        found = plan.find(weights)
        if found is None:
            together = plan.take(weights, self._most_together)
            wholes = self._gather_to_compute(together, last.reasons if last else ())
            found = wholes[: len(weights)]
            plan.wholes.update((id(w), one) for w, one in zip(together, wholes))
        return found

    def _gated(self, group: UnitGroup, call: UnitCall, outputs: Any) -> Any:
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
            self._arrive(group, call, [one for one in grads if one is not None])
            return grads

        record.record_operation("ShardedUnit", outside, inside, gradient)
        call.is_recorded = True
        pairs = {id(old): new for old, new in zip(inside, outside)}
        return tree.map_structure(lambda leaf: pairs.get(id(leaf), leaf), outputs)

    def _arrive(self, group: UnitGroup, call: UnitCall, grads: list[Any]) -> None:
        """Gathers weights once more, as the gradients of a unit's outputs have come."""
        if not self._backwards or framework_ops.get_default_graph() is not call.graph:
            return
        backward, reasons = self._backwards[-1], numbers_of(grads)
        before = [] if group.before is None or group.before.is_over else [group.before]
        for some in (group, *before):
            calls = [one for one in some.calls if one.graph is call.graph and one.is_recorded]
            calls = [one for one in calls if not (one.is_stale or id(one) in backward.found)]
            # The last one's are still there: its backward comes next.
            needed = {id(one): [] if some.is_last else one.of_backward() for one in calls}
            weights = {id(w): w for one in calls for w in (one.weights[i] for i in needed[id(one)])}
            again = dict(zip(weights, self._gather([*weights.values()], reasons)))
            for one in calls:
                backward.add(one, {i: again[id(one.weights[i])] for i in needed[id(one)]})
            found = [backward.found.get(id(one), {}) for one in some.calls]
            reasons = [*reasons, *(whole for one in found for whole in one.values())]

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Context in which a tape makes the operations of backward."""
        if tf.executing_eagerly() or not self._frees:
            yield
            return
        for group in self._groups.get(current_step(), [])[-1:]:
            group.is_over = True
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
            kinds = [(w.dtype, id(c)) for w, c in zip(weights, compressors)]
            of_number = kinds.__getitem__, size.__getitem__
            for _, bucket in gradients.buckets(range(len(size)), *of_number, self._bucket_bytes):
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
        rows, _, _ = routes.gather_row(*hop, compressor, wide, (), step)
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


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and (leaf.dtype.is_floating or leaf.dtype.is_complex)
