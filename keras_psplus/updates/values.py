"""The numbers of a gradient, whether it is dense or has rows."""

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf


def map_values(
    function: Callable[[tf.Tensor], tf.Tensor], gradient: tf.Tensor | tf.IndexedSlices | None
) -> tf.Tensor | tf.IndexedSlices | None:
    """Applies a function to a gradient's numbers.

    Embeddings have gradients of rows, `tf.IndexedSlices`, which cannot be computed with as tensors
    can.

    Args:
        function: Function of a tensor that returns one of the same shape, by elements.
        gradient: Tensor, `tf.IndexedSlices` or None.

    Returns:
        What the function has made of the tensor, or of the values of the slices; None for None.

    Example:

    ```python
    doubled = [updates.map_values(lambda values: 2 * values, grad) for grad in grads]
    ```
    """
    if isinstance(gradient, tf.IndexedSlices):
        values = function(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return None if gradient is None else function(gradient)


def numbers_of(gradients: Iterable[Any]) -> list[Any]:
    """Tensors with the numbers of gradients, which may be `tf.IndexedSlices`."""
    return [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients]


def no_rows_of(tensor: tf.Tensor) -> tf.Tensor:
    """None of a tensor's rows, which the graph does not know.

    TensorFlow takes the shape that a function assigns to a variable for that of what it has read
    before: with `tf.zeros([0])`, `tf.size` of the variable's rows is 0.
    """
    return tensor[: tf.minimum(tf.shape(tensor)[0], 0)]


def zeros_like(tensor: tf.Tensor) -> tf.Tensor:
    """Zeros in the place of a tensor, made when the tensor is there.

    Those of `tf.zeros` are constants of a graph for TensorFlow, which take their memory from the
    first step to the last: in the places of gradients, as much as the model.

    Args:
        tensor: Tensor of static shape; of another one, they are those of `tf.zeros_like`.
    """
    size = tensor.shape.num_elements()
    if not size:
        return tf.identity(tensor) if size == 0 else tf.zeros_like(tensor)
    first = tf.reshape(tensor, [-1])[0]
    # False, which TensorFlow cannot know.
    never = tf.logical_and(first != first, tf.equal(first, first))
    return tf.fill(tensor.shape, tf.cast(never, tensor.dtype))
