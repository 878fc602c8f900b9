"""Moving averages and constraints of weights, computed on the servers that hold them.

Stock Keras computes moving averages of weights and constraints where the step runs, so that a
worker would pull and push every weight once more for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import ops
from keras_psplus.parameter_server.transport.pulls import PulledVariable, exact_reads_flag

if TYPE_CHECKING:
    import keras

_merge_call = tf.__internal__.distribute.interim.maybe_merge_call


def constrain(
    strategy: tf.distribute.Strategy,
    constraints: Sequence[tuple[keras.Variable, Callable[..., Any]]],
) -> None:
    """Has variables satisfy their constraints, on their servers.

    Args:
        strategy: The strategy that the variables are of.
        constraints: List of pairs of a Keras variable and its constraint.
    """
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
    """Has an optimizer apply gradients, and variables satisfy their constraints on their servers.

    Args:
        strategy: The strategy that the variables are of.
        variables: Keras variables.
        apply: Function without arguments that has Keras do so.
    """
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
