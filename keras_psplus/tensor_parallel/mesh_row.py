"""Calls of a user's own layers, which compute with this worker's parts of weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.tensor_parallel.group import ModelGroup, part_of
from keras_psplus.tensor_parallel.rules import local_value
from keras_psplus.tensor_parallel.variable import cut_of


class MeshRow:
    """Workers of a row of the mesh, for the `call_in_parts` of your own layers.

    In a step of `ModelParallelStrategy`, that method is called in the place of `call`, with the
    same arguments behind this one, if the layer or one inside it has a cut weight. Tensors that it
    gets and returns are whole, the same on these workers, as are their gradients. A whole tensor of
    which parts or summands are computed goes through `split` or `enter`.

    Args:
        group: Collectives of these workers.

    Attributes:
        size: Number of workers.
        place: Number of this worker among them.

    Example:

    ```python
    class Experts(keras.layers.Layer):
        def call_in_parts(self, row, x):
            up, down = row.part(self.up, axis=0), row.part(self.down, axis=0)
            return row.sum(self.mixture(row.enter(x), up, down))
    ```
    """

    def __init__(self, group: ModelGroup) -> None:
        self._group, self.size, self.place = group, group.size, group.place

    def part(self, variable: keras.Variable, axis: int) -> tf.Tensor:
        """This worker's part of a weight, which layouts may cut along the same axis.

        Args:
            variable: A weight of the layer.
            axis: Axis along which it has equal parts.
        """
        cut = cut_of(variable)
        if cut is not None and cut.cut.axis == axis % len(variable.shape):
            return local_value(variable)
        return self.split(tf.convert_to_tensor(variable), axis)

    def split(self, whole: tf.Tensor, axis: int) -> tf.Tensor:
        """This worker's part of a tensor that all have.

        Args:
            whole: The tensor, whose size along the axis is static.
            axis: Axis along which it has equal parts.
        """
        found = part_of(whole, axis)
        if found is None and (whole.shape[axis] is None or whole.shape[axis] % self.size):
            raise ValueError(
                f"dimension {axis} of a tensor cannot be cut into {self.size} equal parts: choose "
                f"another size, axis or mesh. Received: shape={tuple(whole.shape)}"
            )
        return self._group.split(whole, axis) if found is None else found

    def enter(self, whole: tf.Tensor) -> tf.Tensor:
        """The same tensor, to compute parts or summands of: sums its gradients.

        Args:
            whole: A tensor that all have.
        """
        return self._group.enter(whole)

    def sum(self, summand: tf.Tensor) -> tf.Tensor:
        """The sum of the workers' tensors.

        Args:
            summand: This worker's.
        """
        return self._group.sum(summand)

    def stack(self, part: tf.Tensor, axis: int) -> tf.Tensor:
        """The tensor of the workers' parts, one behind the other along an axis.

        Args:
            part: This worker's, of the same shape on all.
            axis: The axis.
        """
        return self._group.stack(part, axis)


def own_rule_for(layer: Any, group: ModelGroup) -> Callable[..., Any] | None:
    """The layer's own `call_in_parts`; None if it has none, or no cut weight."""
    call = getattr(layer, "call_in_parts", None)
    if call is None or all(cut_of(variable) is None for variable in layer.variables):
        return None
    return functools.partial(call, MeshRow(group))
