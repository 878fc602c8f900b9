"""Placeholder tensors, replaced once the gradients' sums are known.

A placeholder is an identity operation. Its input can be changed for as long as its graph is being
built.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from keras_psplus.tf_internals import (
    control_flow_func_graphs,
    control_flow_util,
    framework_ops,
    func_graph,
)
from keras_psplus.updates import map_values

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices

_CALLS = "PartitionedCall", "StatefulPartitionedCall"
# Types of operations: those that give on rows or draw random numbers, and those that may inside.
_DIFFERING = "Random", "Iterator", "Optional", "PyFunc", "Multinomial", "Shuffle"
_STATEFUL = "StatefulPartitionedCall", "If", "While", "Case"


class TapeCall:
    """Gradients of one call of a tape, and the placeholders returned for them.

    Attributes:
        parts: List of the gradients, without None.
        graph: The graph that the stand-ins are in, None for eager tensors.
        given: List like `grads`, of stand-ins; in eager mode, of copies.
        left: Numbers of the parts whose stand-ins are still in their place, in order.
    """

    def __init__(self, grads: Sequence[Gradient | None], variables: Sequence[Any]) -> None:
        kept = [i for i, gradient in enumerate(grads) if gradient is not None]
        self.parts: list[Any] = [grads[i] for i in kept]
        self.variables = [variables[i] for i in kept]
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._own = [_stand_in(gradient) for gradient in self.parts]
        leaves = [tensor for one in self._own for tensor in _leaves(one)]
        self._ops = set() if self.graph is None else {id(tensor.op) for tensor in leaves}
        self._places = kept, len(grads)
        # Numbers of the parts that an optimizer has taken, by ids of their variables.
        self._taken: dict[int, int] = {}
        self.left = [*range(len(kept))]

    @property
    def given(self) -> list[Gradient | None]:
        kept, size = self._places
        found = [None] * size
        for i, one in zip(kept, self._own):
            found[i] = one
        return found

    def describe(self) -> str:
        """The names of the variables, as far as they fit into a line."""
        names = [getattr(variable, "path", variable.name) for variable in self.variables]
        return ", ".join(names[:3]) + (" and others" if names[3:] else "")

    @property
    def is_open(self) -> bool:
        return bool(self.left)

    @property
    def is_eager(self) -> bool:
        return self.graph is None

    @property
    def ops_of_sums(self) -> set[int]:
        """Ids of the operations of stand-ins that sums have taken the place of."""
        own = [one for i, one in enumerate(self._own) if i not in self.left]
        return set() if self.is_eager else {id(t.op) for one in own for t in _leaves(one)}

    @property
    def _tensors(self) -> list[tf.Tensor]:
        return [tensor for i in self.left for tensor in _leaves(self._own[i])]

    def graph_context(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which operations are added where the stand-ins are."""
        return contextlib.nullcontext() if self.graph is None else self.graph.as_default()

    def is_used(self, outputs: Sequence[Any] = ()) -> bool:
        """Whether anything uses a stand-in where it can still be replaced."""
        returned = {id(tensor) for tensor in outputs}
        return not self._is_finished and any(
            tensor.consumers() or id(tensor) in returned for tensor in self._tensors
        )

    def is_used_inside(self) -> bool:
        """Whether a finished function uses a stand-in otherwise than by returning it."""
        return self._is_finished and any(
            not self._is_returned(consumer) for t in self._tensors for consumer in t.consumers()
        )

    def part_of(self, gradient: Gradient | None) -> Gradient | None:
        """The part that a gradient is the stand-in for, or None."""
        for i, (own, part) in enumerate(zip(self._own, self.parts)):
            if (self.is_eager or i in self.left) and _is_same(own, gradient):
                if self.graph is not None:
                    # Users of the part may ask whether anything else uses it.
                    _replace(
                        own, tf.nest.map_structure(_nothing_like, part, expand_composites=True)
                    )
                    self._taken[_identity(self.variables[i])] = i
                return part
        return None

    def has_made(self, gradient: Gradient | None) -> bool:
        """Whether a gradient was computed of a stand-in, and is none itself."""
        is_own = any(_is_same(own, gradient) for own in self._own)
        return not is_own and self.leads_to(gradient)

    def leads_to(self, gradient: Gradient | None) -> bool:
        """Whether a gradient is a stand-in or was computed of one."""
        if gradient is None or self._is_finished:
            return False
        if self.graph is None:
            # Eager tensors do not say what they were computed from.
            return True
        return any(id(op) in self._ops for op in sources([gradient], self._ops))

    def was_changed_inside(self, gradient: Gradient | None) -> bool:
        """Whether a gradient comes from a finished function that has changed a stand-in."""
        if gradient is None or not self._is_finished or not self.is_used_inside():
            return False
        if isinstance(_leaves(gradient)[0], framework_ops.EagerTensor):
            return True
        name = getattr(self.graph, "name", None)
        return any(
            op.type in _CALLS and name in op.get_attr("f").name for op in sources([gradient])
        )

    def was_changed_outside(self, gradient: Gradient | None) -> bool:
        """Whether a gradient was computed of a stand-in that a finished function has returned."""
        if gradient is None or not self._is_finished:
            return False
        seen, waiting = set(), [(tensor, False) for tensor in _leaves(gradient)]
        while waiting:
            tensor, is_changed = waiting.pop()
            if isinstance(tensor, framework_ops.EagerTensor) or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            graph = _graph_of_call(tensor.op)
            if self.graph is not None and graph is self.graph:
                ends = sources([graph.outputs[tensor.value_index]], self._ops)
                if is_changed and any(id(op) in self._ops for op in ends):
                    return True
                continue
            is_changed = is_changed or tensor.op.type != "Identity"
            waiting += [(one, is_changed) for one in tensor.op.inputs]
        return False

    def close(self, sums: Sequence[Gradient]) -> None:
        """Puts sums in the place of the stand-ins that are left."""
        for i, total in zip(self.left, sums):
            if self.graph is None:
                self._own[i] = total
            else:
                _replace(self._own[i], total)
        self.left = []

    def put_sums(self, variables: Sequence[Any], sums: Sequence[Gradient]) -> None:
        """Puts sums in the place of the stand-ins of parts that an optimizer has taken.

        Sums that are in another graph, as in a branch, are left out. So are those of rows, in which
        none may come twice: in what the tape has, some do.
        """
        for variable, total in zip(variables, sums):
            i = self._taken.get(_identity(variable))
            if i is None or isinstance(total, tf.IndexedSlices):
                continue
            if total.graph is self.graph:
                _replace(self._own[i], total)
                del self._taken[_identity(variable)]
                self.left.remove(i)

    @property
    def _is_finished(self) -> bool:
        """Whether the graph was that of a function whose tracing is over."""
        graph = self.graph
        if not isinstance(graph, func_graph.FuncGraph):
            return False
        current = tf.compat.v1.get_default_graph()
        while current is not None:
            if current is graph:
                return False
            current = getattr(current, "outer_graph", None)
        return True

    def _is_returned(self, op: tf.Operation) -> bool:
        outputs = {id(output) for output in getattr(self.graph, "outputs", ())}
        return op.type == "Identity" and id(op.outputs[0]) in outputs


def is_made_of(calls: Sequence[TapeCall], gradient: Gradient | None, summed: bool = False) -> bool:
    """Whether a gradient is equal on all replicas, as sums are.

    It is if it was computed of those and of nothing that may differ from replica to replica: rows
    of a batch, random numbers, what a function of the graph has done. False where that is not sure.

    Args:
        summed: Whether only sums count that are already in the place of stand-ins.
    """
    ends = set().union(*(call.ops_of_sums if summed else call._ops for call in calls))
    met = set[int]()
    return are_equal_everywhere(_leaves(gradient), ends, met) and bool(met)


def are_equal_everywhere(
    tensors: Sequence[tf.Tensor], ends: Collection[int] = (), met: set[int] | None = None
) -> bool:
    """Whether tensors surely have the same values on all replicas, as constants and variables do.

    Args:
        ends: Ids of operations of which that is known.
        met: Set that those of `ends` are added to of which the tensors were computed.
    """
    callers: dict[int, list[tf.Operation]] = {}
    seen, waiting = set[int](), [*tensors]
    while waiting:
        tensor = waiting.pop()
        if isinstance(tensor, framework_ops.EagerTensor) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        op, graph = tensor.op, _graph_of_call(tensor.op)
        if id(op) in ends:
            if met is not None:
                met.add(id(op))
        elif graph is not None:
            callers.setdefault(id(graph), []).append(op)
            waiting.append(graph.outputs[tensor.value_index])
        elif op.type in _STATEFUL or any(name in op.type for name in _DIFFERING):
            return False
        elif op.type == "Placeholder":
            given = _given(tensor, callers.get(id(op.graph), ())) or _captured(op)
            if not given:
                return False
            waiting += given
        else:
            waiting += op.inputs
    return True


def _graph_of_call(op: tf.Operation) -> tf.Graph | None:
    """The graph of the function that an operation calls, or None."""
    if op.type not in _CALLS:
        return None
    return getattr(op.graph._get_function(op.get_attr("f").name), "graph", None)


def _given(placeholder: tf.Tensor, callers: Sequence[tf.Operation]) -> list[tf.Tensor]:
    """Arguments of a function's calls for one of its inputs."""
    inputs = placeholder.graph.inputs if callers else ()
    places = [i for i, one in enumerate(inputs) if one is placeholder]
    return [op.inputs[i] for op in callers for i in places]


def sources(gradients: Iterable[Gradient], ends: Collection[int] = ()) -> Iterator[tf.Operation]:
    """All operations that gradients were computed by, also those outside of a function or branch.

    Beyond operations whose ids are in `ends`, none is looked for.
    """
    seen, waiting = set(), [t for one in gradients for t in _leaves(one) if tf.is_tensor(t)]
    while waiting:
        tensor = waiting.pop()
        if isinstance(tensor, framework_ops.EagerTensor) or id(tensor.op) in seen:
            continue
        op = tensor.op
        seen.add(id(op))
        yield op
        if id(op) in ends:
            continue
        waiting += op.inputs
        if op.type == "Placeholder":
            waiting += _captured(op)


def _stand_in(gradient: Gradient) -> Gradient:
    if tf.executing_eagerly():
        return map_values(tf.identity, gradient)
    if isinstance(gradient, tf.IndexedSlices):
        # There are more rows in the sum.
        return tf.IndexedSlices(
            _of_any_length(gradient.values), _of_any_length(gradient.indices), gradient.dense_shape
        )
    return tf.identity(gradient)


def _of_any_length(tensor: tf.Tensor) -> tf.Tensor:
    shape = [None, *tensor.shape[1:]]
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=shape)


def _nothing_like(tensor: tf.Tensor) -> tf.Tensor:
    shape = [0 if size is None else size for size in tensor.shape]
    with tensor.graph.as_default(), tf.control_dependencies(None):
        nothing = tf.zeros(shape, tensor.dtype)
        # An operation's input is replaced only by one of a shape that could be the same.
        return tf.raw_ops.PlaceholderWithDefault(input=nothing, shape=tensor.shape)


def _replace(own: Gradient, total: Gradient) -> None:
    if isinstance(own, tf.IndexedSlices) and not isinstance(total, tf.IndexedSlices):
        raise TypeError(f"The sum of rows must be one of rows. Received: {total}")
    for tensor, other in zip(_leaves(own), _leaves(total)):
        tensor.op._update_input(0, other)


def _leaves(gradient: Gradient) -> list[tf.Tensor]:
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [gradient]


def _identity(variable: keras.Variable | tf.Variable) -> int:
    return id(getattr(variable, "_value", variable))


def _is_same(own: Gradient, gradient: Gradient | None) -> bool:
    if isinstance(own, tf.IndexedSlices):
        return isinstance(gradient, tf.IndexedSlices) and gradient.values is own.values
    return own is gradient


def _captured(op: tf.Operation) -> list[tf.Tensor]:
    """The tensors of outer graphs that a placeholder of a function stands for."""
    if not isinstance(op.graph, func_graph.FuncGraph):
        return []
    return [outer for outer, inner in op.graph.captures if inner is op.outputs[0]]


# Gradients that a loop of the graph has returned, for each replica's rows.
#
# Their mean over the replicas is right for what is linear in them, as a mean over micro-batches,
# and for what is computed row by row, but a norm of one replica's is none of the global batch's.

_LOOPS = "While", "StatelessWhile"
# Types of operations that are linear in all inputs.
_LINEAR = {
    *("Add", "AddN", "AddV2", "Cast", "ConcatV2", "ExpandDims", "Identity", "Mean", "Neg", "Pack"),
    *("Reshape", "StridedSlice", "Squeeze", "Sub", "Sum", "Transpose"),
}
# And in one of them; in the first, if the other is what that is divided by.
_BILINEAR, _QUOTIENTS = {"Mul", "MulNoNan"}, {"Div", "DivNoNan", "RealDiv"}


def nonlinear_use(
    gradient: tf.Tensor | tf.IndexedSlices, bodies: Collection[str], variables: Iterable[Any]
) -> str | None:
    """Type of an operation that is not linear in loops' results, or None.

    Args:
        bodies: Names of the loops' bodies in which gradients were taken.
        variables: The variables that they are the gradients of. What is returned for each row has
            another shape than they have.
    """
    shapes = [tuple(variable.shape) for variable in variables]
    found = list(sources([gradient]))
    returned = [t for op in found if _is_loop(op, bodies) for t in op.outputs]
    waiting = [t for t in returned if t.dtype.is_floating and _shape(t) in shapes]
    known, marked = {id(op) for op in found}, {id(t) for t in waiting}
    while waiting:
        for op in waiting.pop().consumers():
            if id(op) not in known or _is_loop(op, bodies):
                continue
            used = [id(one) in marked for one in op.inputs]
            is_linear = (
                op.type in _LINEAR
                or (op.type in _BILINEAR and sum(used) == 1)
                or (op.type in _QUOTIENTS and used == [True, False])
            )
            if not is_linear:
                return str(op.type)
            new = [one for one in op.outputs if id(one) not in marked]
            marked.update(map(id, new))
            waiting += new
    return None


def _is_loop(op: tf.Operation, bodies: Collection[str]) -> bool:
    return op.type in _LOOPS and op.get_attr("body").name in bodies


def _shape(tensor: tf.Tensor) -> tuple[int | None, ...] | None:
    return None if tensor.shape.rank is None else tuple(tensor.shape)


# Traces in which replicas cannot ask each other for sums.
#
# A loop may turn another number of times on each replica, as one over rows does; code that is
# vectorised over rows, or compiled by XLA, has no collectives.


# The scope in which `tf.vectorized_map` traces what it then does for all rows at once.
_VECTORIZED = "loop_body"


def loops_around(graph: tf.Graph, outermost: tf.Graph) -> list[str]:
    """Names of the loop bodies around a graph, up to an outermost graph."""
    body = control_flow_func_graphs.WhileBodyFuncGraph
    return [one.name for one in _inside(graph, outermost) if isinstance(one, body)]


def is_without_collectives(graph: tf.Graph, outermost: tf.Graph) -> bool:
    """Whether what is traced now, in a graph inside another one, can have no collectives."""
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        return True
    graphs = [*_inside(graph, outermost), outermost]
    scopes = [scope for one in graphs for scope in one.get_name_scope().split("/")]
    return any(scope.startswith(_VECTORIZED) for scope in scopes)


def _inside(graph: tf.Graph, outermost: tf.Graph) -> Iterator[tf.Graph]:
    while graph is not outermost and isinstance(graph, func_graph.FuncGraph):
        yield graph
        graph = graph.outer_graph
