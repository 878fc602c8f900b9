"""Collectives of the workers that share a model's weights, with their gradients.

Values are whole, the same on all of these workers, or local, each worker's part along one axis. The
gradient of a whole value is whole; that of a local one is local. In Megatron-LM, `enter` is f
and `sum` is g. Each is the other's gradient, and so are `stack` and `split`: there are gradients of
gradients, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from keras_psplus.tf_internals import framework_ops
from keras_psplus.tf_internals.trace_end import call_at_end

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher


class LocalPart(NamedTuple):
    """This worker's part of a whole tensor.

    Attributes:
        tensor: The part.
        axis: Axis along which the whole is cut.
    """

    tensor: tf.Tensor
    axis: int


def part_of(whole: Any, axis: int) -> tf.Tensor | None:
    """The part along an axis that a whole tensor was gathered from, or None."""
    found = getattr(whole, "_local_part", None)
    return found.tensor if found is not None and found.axis == axis % whole.shape.rank else None


class ModelGroup:
    """Collectives of a row of the mesh.

    Args:
        launcher: `operations.Launcher` of this worker in its row.
        place: Place of this worker in it.
        size: Number of its workers.
    """

    def __init__(self, launcher: Launcher, place: int, size: int) -> None:
        self.launcher, self.place, self.size = launcher, place, size

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
        return _with_gradient(tf.identity, self.sum, whole)

    def sum(self, partial: tf.Tensor) -> tf.Tensor:
        """The whole tensor of which each worker has a summand."""
        return _with_gradient(self.reduce, self.enter, partial)

    def stack(self, local: tf.Tensor, axis: int) -> tf.Tensor:
        """The whole tensor of the workers' parts, which remembers this worker's part.

        It is gathered at the end of the trace, if anything but its shape is used by then: what asks
        for the part needs no gathering, and TensorFlow would run one that nothing uses.
        """
        axis %= local.shape.rank
        made: list[tf.Tensor] = []
        graph = framework_ops.get_default_graph()
        # It is traced after collectives that may need it: lanes of those would have it wait for
        # them, and so would those of branches within this graph.
        lanes = f"at the end of a graph at depth {_depth(graph)}"

        def stand_in(x: tf.Tensor) -> tf.Tensor:
            made.append(tf.identity(_zeros_of_whole(x, axis, self.size)))
            return made[0]

        def fill(outputs: Sequence[Any]) -> None:
            if _is_used(whole, outputs):
                with self.launcher.keys.named(lanes):
                    made[0].op._update_input(0, self.gather(local, axis))

        whole = _with_gradient(stand_in, lambda grad: self.split(grad, axis), local)
        call_at_end(graph, fill)
        whole._local_part = LocalPart(local, axis)
        return whole

    def split(self, whole: tf.Tensor, axis: int) -> tf.Tensor:
        """This worker's part of a whole tensor."""
        axis %= whole.shape.rank
        return _with_gradient(
            lambda x: self.own(x, axis), lambda grad: self.stack(grad, axis), whole
        )

    def reduce(self, partial: tf.Tensor) -> tf.Tensor:
        """Sum of the workers' tensors, without a gradient."""
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
        if tensor.dtype == tf.bfloat16:
            # Of which the kernel does not know: bits are gathered.
            return tf.bitcast(self._stacked(tf.bitcast(tensor, tf.float16)), tf.bfloat16)
        gathered = self.launcher.gather_equal(tensor)
        return tf.ensure_shape(gathered, [self.size, *tensor.shape])


def _is_used(tensor: tf.Tensor, outputs: Sequence[Any]) -> bool:
    """Whether more than its shape is used, also by what stands for it."""
    return any(one is tensor for one in outputs) or any(
        _is_used(op.outputs[0], outputs) if op.type == "Identity" else op.type != "Shape"
        for op in tensor.consumers()
    )


def _depth(graph: Any) -> int:
    outer = getattr(graph, "outer_graph", None)
    return 0 if outer is None else 1 + _depth(outer)


def _zeros_of_whole(local: tf.Tensor, axis: int, size: int) -> tf.Tensor:
    """Zeros of the shape that the whole of a part has."""
    static, shape = local.shape.as_list(), tf.unstack(tf.shape(local))
    static[axis] *= size
    shape = [known or unknown for known, unknown in zip(static, shape)]
    return tf.ensure_shape(tf.zeros(shape, local.dtype), static)


def _with_gradient(
    forward: Callable[[Any], tf.Tensor], backward: Callable[[Any], tf.Tensor], tensor: tf.Tensor
) -> tf.Tensor:
    result: tf.Tensor = tf.custom_gradient(lambda x: (forward(x), backward))(tensor)
    return result
