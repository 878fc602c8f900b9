"""Clipping by the norms of whole gradients, of which each worker has parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import ops
from keras_psplus.updates import map_values

if TYPE_CHECKING:
    from keras.optimizers import Optimizer

Sums = Callable[[list[tf.Tensor]], list[tf.Tensor]]


def by_norms(
    optimizer: Optimizer,
    grads: Sequence[Any],
    dtype: tf.DType | str,
    parts: Sequence[int],
    sum_over_parts: Sums,
) -> list[Any]:
    """Gradients, clipped by an optimizer's `clipnorm` or `global_clipnorm`.

    Args:
        optimizer: The optimizer, with one of the two.
        grads: List of gradients: whole, parts, or None for those of other workers.
        dtype: Dtype of scales for those.
        parts: Numbers of the gradients of which each worker has a part, or none.
        sum_over_parts: Function that sums small tensors over the workers that have the parts.

    Returns:
        List of clipped gradients, in the same order.
    """
    limit = optimizer.clipnorm or optimizer.global_clipnorm
    squares = [tf.zeros([]) if g is None else ops.sum(ops.square(g)) for g in grads]
    for i, total in zip(parts, sum_over_parts([tf.cast(squares[i], tf.float32) for i in parts])):
        squares[i] = total
    norms = [ops.sqrt(tf.cast(square, tf.float32)) for square in squares]
    if optimizer.clipnorm:
        scales = [limit / tf.maximum(norm, limit) for norm in norms]
    else:
        norm = ops.sqrt(tf.add_n([tf.cast(square, tf.float32) for square in squares]))
        # As in Keras: nothing that is not finite remains hidden.
        scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        scales = [scale] * len(grads)
    clipped: list[Any] = []
    for g, scale in zip(grads, scales):
        scale = tf.cast(scale, dtype if g is None else g.dtype)
        if optimizer.clipnorm and isinstance(g, tf.IndexedSlices):
            clipped.append(map_values(functools.partial(tf.multiply, scale), g))
        else:
            # By its global norm, Keras makes a gradient of rows dense.
            clipped.append(None if g is None else g * scale)
    return clipped
