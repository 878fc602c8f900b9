"""Clipping of sums, moving averages and constraints, computed on the servers that hold them.

Stock Keras computes moving averages of weights and constraints where the step runs, so that a
worker would pull and push every weight once more for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import ops
from keras_psplus.parameter_server.transport.pulls import PulledVariable, exact_reads_flag
from keras_psplus.parameter_server.transport.sharded import ShardParts

_merge_call = tf.__internal__.distribute.interim.maybe_merge_call


def constrain(
    strategy: tf.distribute.Strategy,
    constraints: Sequence[tuple[keras.Variable, Callable[..., Any]]],
) -> None:
    """Has variables satisfy constraints, given as pairs, on their servers."""
    for variable, constraint in constraints:
        if isinstance(variable._value, PulledVariable):
            _run_on_server(strategy, variable, lambda v, c: v.assign(c(v)), (variable, constraint))
        else:
            # That of a sharded variable may need all of its rows.
            with exact_reads_flag.raised():
                variable.assign(constraint(variable))


def apply_and_constrain(
    strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable], apply: Callable[[], Any]
) -> None:
    """Has Keras apply gradients, and variables satisfy their constraints on their servers."""
    constraints = [(v, v.constraint) for v in variables if v.constraint is not None]
    for variable, _ in constraints:
        variable.constraint = None
    try:
        apply()
    finally:
        for variable, constraint in constraints:
            variable.constraint = constraint
    constrain(strategy, constraints)


def average(
    strategy: tf.distribute.Strategy,
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
) -> None:
    """Updates the moving averages of weights, on their servers."""
    not_first_step = ops.not_equal(optimizer.iterations, 0)
    for variable, average in zip(variables, optimizer._model_variables_moving_average):
        if average is not None:
            momentum = ops.cast(not_first_step, variable.dtype) * optimizer.ema_momentum
            _run_on_server(strategy, variable, _average, (variable, average, momentum))


def _average(variable: keras.Variable, average: keras.Variable, momentum: float) -> None:
    # TensorFlow's variables: of a sharded one these are the shards that are updated now.
    value = momentum * average._value.value() + (1 - momentum) * variable._value.value()
    average._value.assign(value)


def _run_on_server(
    strategy: tf.distribute.Strategy,
    variable: keras.Variable,
    update: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Runs an update on the server, or servers, that a variable lies on."""

    def merged(distribution: tf.distribute.Strategy) -> None:
        distribution.extended.update(variable._value, lambda _: update(*args), group=False)

    _merge_call(merged, strategy)


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
        else _at(lambda g: optimizer._clip_gradients([g])[0], gradient)
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
    return _at(lambda g: g * ops.cast(factor, g.dtype), gradient)


def _at(function: Callable[[Any], Any], gradient: Any) -> Any:
    """Applies a function to a gradient, or each of its parts, on its server."""
    if gradient is None:
        return None
    if isinstance(gradient, ShardParts):
        return ShardParts(_at(function, part) for part in gradient)
    with tf.device(gradient.device):
        return function(gradient)
