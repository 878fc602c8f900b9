"""Sums of gradients are clipped where they are: on their servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import ops
from keras_psplus.parameter_server.transport.sharded import ShardParts

if TYPE_CHECKING:
    import keras


def clip(
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[tf.Tensor | tf.IndexedSlices | ShardParts | None],
) -> list[tf.Tensor | tf.IndexedSlices | ShardParts | None]:
    """Clips the sums of a global step on their servers, as the optimizer's arguments say.

    Elsewhere, each would cross the network twice more.
    """
    by_norm = optimizer.clipnorm and optimizer.clipnorm > 0
    if not by_norm and optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
        norm, limit = _norm(grads), optimizer.global_clipnorm
        # As in Keras: NaN if the norm is not finite.
        factor = limit * ops.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [_times(gradient, factor) for gradient in grads]
    return [
        _times(gradient, optimizer.clipnorm / ops.maximum(_norm([gradient]), optimizer.clipnorm))
        if by_norm and isinstance(gradient, ShardParts)
        else _run_on_server(lambda g: optimizer._clip_gradients([g])[0], gradient)
        for gradient in grads
    ]


def _norm(gradients: Iterable[Any]) -> tf.Tensor:
    squares = []
    for gradient in gradients:
        for part in gradient if isinstance(gradient, ShardParts) else [gradient]:
            if part is not None:
                with tf.device(part.device):
                    squares.append(ops.cast(ops.sum(ops.square(part)), "float32"))
    return ops.sqrt(ops.sum(ops.stack(squares)))


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    return _run_on_server(lambda g: g * ops.cast(factor, g.dtype), gradient)


def _run_on_server(function: Callable[[Any], Any], gradient: Any) -> Any:
    """Applies a function to a gradient, or each of its parts, on its server."""
    if gradient is None:
        return None
    if isinstance(gradient, ShardParts):
        return ShardParts(_run_on_server(function, part) for part in gradient)
    with tf.device(gradient.device):
        return function(gradient)
