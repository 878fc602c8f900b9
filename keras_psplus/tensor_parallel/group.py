"""Collectives of the workers that share a model's weights, with their gradients.

Values are whole, the same on all of these workers, or local, each worker's part along one axis. The
gradient of a whole value is whole; that of a local one is local. In Megatron-LM, `enter` is f
and `sum` is g. Each is the other's gradient, and so are `stack` and `split`: there are gradients of
gradients, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.log import logger
from keras_psplus.tensor_parallel import vectorized
from keras_psplus.tensor_parallel.late_gathers import LateGathers, LocalPart
from keras_psplus.tf_internals import framework_ops, record

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher


class ModelGroup:
    """Collectives of a row of the mesh.

    Args:
        launcher: `operations.Launcher` of this worker in its row.
    """

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
        vectorized.check_not_here("a tensor in parts")
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
        vectorized.check_not_here("a sum")
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
        vectorized.check_not_here("a tensor in parts")
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
        forward: The function.
        backward: Function of the value's gradient that returns the tensor's.
        again: The function with its gradient, for what a `tf.autodiff.ForwardAccumulator` asks.
        tensor: What it is computed of.
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
