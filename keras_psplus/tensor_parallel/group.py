"""Collectives of the workers that share a model's weights, with their gradients.

Values are whole, the same on all of these workers, or local, each worker's part along one axis. The
gradient of a whole value is whole; that of a local one is local. In Megatron-LM, `enter` is f
and `sum` is g. Each is the other's gradient, and so are `stack` and `split`: there are gradients of
gradients, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.log import logger
from keras_psplus.tf_internals import framework_ops, record
from keras_psplus.tf_internals.trace_end import call_at_end

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher

# `tf.vectorized_map`, `keras.ops.vectorized_map`, `tape.jacobian` and `tape.batch_jacobian` trace
# one iteration and rewrite its operations, of which collectives are none that TensorFlow knows.
# This is the name scope of its parallel_for/control_flow_ops.py.
_SCOPE = re.compile(r"(^|/)loop_body(_\d+)?(/|$)")


def is_vectorized() -> bool:
    """Whether an iteration of such a loop is being traced."""
    return not tf.executing_eagerly() and bool(_SCOPE.search(tf.get_current_name_scope()))


def check_not_vectorized(what: str) -> None:
    """Raises an error where an exchange would become part of such a loop."""
    if is_vectorized():
        raise NotImplementedError(
            "With weights in parts, what is computed through them cannot be vectorized: workers "
            "exchange values on the way. Give `tape.jacobian` and `tape.batch_jacobian` "
            "`experimental_use_pfor=False`, take a loop in the place of `vectorized_map`, or use "
            f'MultiWorkerMirroredStrategy(shard="all"). Received: {what} in a vectorized loop'
        )


@dataclasses.dataclass(eq=False)
class LocalPart:
    """This worker's part of a whole tensor.

    Attributes:
        axis: Axis along which the whole is cut.
        has_loss: Whether a loss is computed of parts, and needs no whole.
    """

    tensor: tf.Tensor
    axis: int
    has_loss: bool = False


def local_part_of(whole: Any) -> LocalPart | None:
    """The part that a whole tensor was gathered from, or None."""
    found: LocalPart | None = getattr(whole, "_local_part", None)
    return found


def part_of(whole: Any, axis: int) -> tf.Tensor | None:
    """The part along an axis that a whole tensor was gathered from, or None."""
    found = local_part_of(whole)
    return found.tensor if found is not None and found.axis == axis % whole.shape.rank else None


class LateGathers:
    """Wholes of one graph, each with what stands for it until the trace ends.

    Args:
        gather: Function of a part and an axis that returns the whole.
        note: Function that is called with a whole whose loss is computed of parts, and the name
            of an operation for which it is gathered all the same.
    """

    def __init__(
        self,
        graph: Any,
        gather: Callable[[tf.Tensor, int], tf.Tensor],
        note: Callable[[tf.Tensor, str], None],
    ) -> None:
        self._graph, self._gather, self._note = graph, gather, note
        # By operations that stand for wholes.
        self._waiting: dict[tf.Operation, tuple[tf.Tensor, LocalPart]] = {}
        # Last of all: other functions of the end may still use wholes.
        call_at_end(graph, lambda _: call_at_end(graph, self._end))

    def add(self, whole: tf.Tensor, stand_in: tf.Operation, part: LocalPart) -> None:
        """Adds a whole, what stands for it, and the part to gather it from."""
        self._waiting[stand_in] = whole, part

    def _end(self, outputs: Sequence[Any]) -> None:
        waiting, self._waiting = self._waiting, {}
        parts = {stand_in: part.tensor for stand_in, (_, part) in waiting.items()}
        used = _used(self._graph, outputs, parts)
        for stand_in, (whole, part) in waiting.items():
            if stand_in in used:
                if part.has_loss:
                    users = (op.name for op in whole.consumers() if op in used)
                    self._note(whole, next(users, whole.op.name))
                stand_in._update_input(0, self._gather(part.tensor, part.axis))


def _used(
    graph: Any, outputs: Sequence[Any], parts: dict[tf.Operation, tf.Tensor]
) -> set[tf.Operation]:
    """Operations of whose values the graph's outputs or its state depend.

    Args:
        parts: By operations that stand for wholes, parts on which these will depend.
    """
    pending = [op for op in graph.get_operations() if op.op_def.is_stateful]
    pending += [one.op for one in outputs if isinstance(one, tf.Tensor)]
    used: set[tf.Operation] = set()
    while pending:
        op = pending.pop()
        if op in used:
            continue
        used.add(op)
        if op in parts:
            pending.append(parts[op].op)
        # The shape of a whole is known without it.
        elif op.type != "Shape" or not _stands_for_whole(op.inputs[0], parts):
            pending.extend(one.op for one in op.inputs)
            pending.extend(op.control_inputs)
    return used


def _stands_for_whole(tensor: tf.Tensor, parts: dict[tf.Operation, tf.Tensor]) -> bool:
    while tensor.op.type in ("Identity", "IdentityN"):
        if tensor.op in parts:
            return True
        tensor = tensor.op.inputs[tensor.value_index]
    return False


class ModelGroup:
    """Collectives of a row of the mesh."""

    def __init__(self, launcher: Launcher, place: int, size: int) -> None:
        self.launcher, self.place, self.size = launcher, place, size
        self._has_noted = False
        # By ids of graphs, whose functions of the end keep them.
        self._late: weakref.WeakValueDictionary[int, LateGathers] = weakref.WeakValueDictionary()

    def own(self, whole: tf.Tensor, axis: int) -> tf.Tensor:
        """This worker's part of a whole tensor, without a gradient of its own."""
        axis %= whole.shape.rank
        width = whole.shape[axis] // self.size
        begin = [0] * whole.shape.rank
        begin[axis] = self.place * width
        size = [-1] * whole.shape.rank
        size[axis] = width
        shape = whole.shape.as_list()
        shape[axis] = width
        return tf.ensure_shape(tf.slice(whole, begin, size), shape)

    def enter(self, whole: tf.Tensor) -> tf.Tensor:
        """A whole tensor that each worker uses for its part: gradients are summed."""
        return _linear(tf.identity, self.sum, self.enter, whole)

    def sum(self, partial: tf.Tensor) -> tf.Tensor:
        """The whole tensor of which each worker has a summand."""
        return _linear(self.reduce, self.enter, self.sum, partial)

    def stack(self, local: tf.Tensor, axis: int) -> tf.Tensor:
        """The whole tensor of the workers' parts, which remembers this worker's part.

        It is gathered at the end of the trace, if anything but its shape is used by then: what asks
        for the part needs no gathering, and TensorFlow would run one that nothing uses.
        """
        check_not_vectorized("a tensor in parts")
        axis %= local.shape.rank
        made: list[tf.Tensor] = []

        def stand_in(x: tf.Tensor) -> tf.Tensor:
            made.append(tf.identity(_zeros_of_whole(x, axis, self.size)))
            return made[0]

        split, stack = (lambda grad: self.split(grad, axis)), (lambda x: self.stack(x, axis))
        whole = _linear(stand_in, split, stack, local)
        whole._local_part = LocalPart(local, axis)
        self._late_gathers().add(whole, made[0].op, whole._local_part)
        return whole

    def _late_gathers(self) -> LateGathers:
        """Gathers at the end of the graph that is being traced."""
        graph = framework_ops.get_default_graph()
        # They are traced after collectives that may need them: lanes of those would have them wait
        # for these, and so would those of branches within this graph.
        lanes = f"at the end of a graph at depth {_depth(graph)}"

        def gather(local: tf.Tensor, axis: int) -> tf.Tensor:
            # At the end of a graph, no device is given.
            with self.launcher.keys.named(lanes), framework_ops.device(self.launcher._device):
                return self.gather(local, axis)

        late = self._late.get(id(graph))
        if late is None:
            late = self._late[id(graph)] = LateGathers(graph, gather, self._note_gathering)
        return late

    def _note_gathering(self, whole: tf.Tensor, user: str) -> None:
        if self.place == 0 and not self._has_noted:
            self._has_noted = True
            logger.info(
                "logits of shape %s are gathered in each step, as '%s' uses all of them; "
                "cross-entropy and accuracy compute with parts of them",
                tuple(whole.shape),
                user,
            )

    def split(self, whole: tf.Tensor, axis: int) -> tf.Tensor:
        """This worker's part of a whole tensor."""
        axis %= whole.shape.rank
        own, stack = (lambda x: self.own(x, axis)), (lambda grad: self.stack(grad, axis))
        return _linear(own, stack, lambda x: self.split(x, axis), whole)

    def collect(self, local: tf.Tensor, axis: int) -> tf.Tensor:
        """The whole tensor of the workers' parts, gathered here and now."""
        gather, split = (lambda x: self.gather(x, axis)), (lambda grad: self.split(grad, axis))
        return _linear(gather, split, lambda x: self.collect(x, axis), local)

    def own_indices(self, indices: tf.Tensor, width: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Indices of a whole axis as those of this worker's part.

        Those of other parts become 0, and those that no worker has -1.

        Args:
            width: Size of a part.

        Returns:
            The indices, and whether each is in the part.
        """
        place = indices - self.place * width
        is_mine = tf.logical_and(place >= 0, place < width)
        is_there = tf.logical_and(indices >= 0, indices < width * self.size)
        zero = tf.zeros([], indices.dtype)
        return tf.where(is_mine, place, tf.where(is_there, zero, zero - 1)), is_mine

    def reduce(self, partial: tf.Tensor) -> tf.Tensor:
        """Sum of the workers' tensors, without a gradient."""
        check_not_vectorized("a sum")
        wide = tf.float32 if partial.dtype.size == 2 else partial.dtype
        if self.size == 2:
            # As many bytes as around a ring, in half as many messages.
            parts = tf.unstack(tf.cast(self._stacked(partial), wide), self.size)
            return tf.cast(tf.add_n(parts), partial.dtype)
        return tf.cast(self.launcher.reduce_equal(tf.cast(partial, wide)), partial.dtype)

    def gather(self, local: tf.Tensor, axis: int) -> tf.Tensor:
        """The workers' tensors, concatenated along an axis, without a gradient."""
        if self.size == 1:
            return local
        return tf.concat(tf.unstack(self._stacked(local), self.size), axis)

    def _stacked(self, tensor: tf.Tensor) -> tf.Tensor:
        check_not_vectorized("a tensor in parts")
        if tensor.dtype == tf.bfloat16:
            # Of which the kernel does not know: bits are gathered.
            return tf.bitcast(self._stacked(tf.bitcast(tensor, tf.float16)), tf.bfloat16)
        gathered = self.launcher.gather_equal(tensor)
        return tf.ensure_shape(gathered, [self.size, *tensor.shape])


def _depth(graph: Any) -> int:
    outer = getattr(graph, "outer_graph", None)
    return 0 if outer is None else 1 + _depth(outer)


def _zeros_of_whole(local: tf.Tensor, axis: int, size: int) -> tf.Tensor:
    """Zeros of the shape that the whole of a part has."""
    static, shape = local.shape.as_list(), tf.unstack(tf.shape(local))
    static[axis] *= size
    shape = [known or unknown for known, unknown in zip(static, shape)]
    return tf.ensure_shape(tf.zeros(shape, local.dtype), static)


def _linear(
    forward: Callable[[Any], tf.Tensor],
    backward: Callable[[Any], tf.Tensor],
    again: Callable[[Any], tf.Tensor],
    tensor: tf.Tensor,
) -> tf.Tensor:
    """The value of a linear function, with its gradient.

    Args:
        backward: Function of the value's gradient that returns the tensor's.
        again: The function with its gradient, for what a `tf.autodiff.ForwardAccumulator` asks.
    """

    def gradient(grad: Any) -> tf.Tensor:
        # Of rows, as lookups have them, or without the shape that some operations forget.
        grad = tf.convert_to_tensor(grad)
        grad.set_shape(result.shape)
        return backward(grad)

    # Of an operation whose gradient is replaced, TensorFlow's forward mode would still compute the
    # derivative of the operation: it is told here. Functions within the step go by operations.
    with record.stop_recording():
        result: tf.Tensor = tf.custom_gradient(lambda x: (forward(x), gradient))(tensor)
    record.record_operation(
        "OfModelGroup",
        [result],
        [tensor],
        backward_function=lambda grad: [gradient(grad)],
        forward_function=lambda tangent: [again(tangent)],
    )
    return result


_ELEMENTWISE = frozenset(
    "celu elu exponential gelu gelu_approximate hard_shrink hard_sigmoid hard_silu hard_swish "
    "hard_tanh leaky_relu linear log_sigmoid mish quick_gelu relu relu6 selu sigmoid silu "
    "soft_shrink softplus softsign sparse_plus sparse_sigmoid squareplus swish tanh tanh_shrink "
    "threshold".split()
)
_PACKAGES = ("keras", "keras_hub")


def is_elementwise(activation: Any) -> bool:
    """Whether an activation is known to compute each element by itself."""
    if activation is None:
        return True
    package = str(getattr(activation, "__module__", "")).partition(".")[0]
    return package in _PACKAGES and getattr(activation, "__name__", "") in _ELEMENTWISE


class Regions:
    """Parts of a step in which tensors are local, or weights whole.

    Attributes:
        are_local: Whether cut kernels compute local parts and summands, as inside of attention by
            heads, and no worker talks to another.
        are_whole: Whether inner layers are called with gathered weights.
    """

    def __init__(self) -> None:
        self.are_local = self.are_whole = False

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Context in which what cut kernels take and compute stays local."""
        outer, self.are_local = self.are_local, True
        try:
            yield
        finally:
            self.are_local = outer

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Context in which inner layers are called as in one process."""
        outer, self.are_whole = self.are_whole, True
        try:
            yield
        finally:
            self.are_whole = outer

    def enter(self, whole: Any, group: ModelGroup) -> tf.Tensor:
        """A whole tensor that each worker multiplies by its part of a kernel."""
        return whole if self.are_local else group.enter(whole)

    def finish(self, local: Any, axis: int, activation: Any, group: ModelGroup) -> Any:
        """Output of a layer of a local tensor: its activation, and the whole of it.

        Args:
            axis: Axis along which it is cut.
        """
        if is_elementwise(activation):
            local = local if activation is None else activation(local)
            return local if self.are_local else group.stack(local, axis)
        return activation(group.stack(local, axis))
