"""Optimizers under `ParameterServerStrategy`: what changes a variable runs beside it.

Stock Keras computes moving averages of weights and constraints where the step runs, so that a
worker would pull and push every weight once more for each.
"""

import tensorflow as tf
from keras.src import ops
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.optimizers import base_optimizer

from keras_psplus.keras_hooks.ownership import asynchronous
from keras_psplus.keras_hooks.patching import replace
from keras_psplus.parameter_server import local_copies, tally
from keras_psplus.parameter_server.pulls import PulledVariable, exact
from keras_psplus.parameter_server.sync_functions import is_applying

_merge_call = tf.__internal__.distribute.interim.maybe_merge_call


def install():
    """Installs this module's hooks."""
    base = base_optimizer.BaseOptimizer
    replace(base, "apply", ["self", "grads", "trainable_variables"])(_apply)
    replace(base, "_update_model_variables_moving_average", ["self", "trainable_variables"])(
        _update_moving_averages
    )
    replace(tf_optimizer.TFOptimizer, "_all_reduce_sum_gradients", ["self", "grads_and_vars"])(
        _push_gradients
    )
    replace(
        tf_optimizer.TFOptimizer,
        "_backend_update_step",
        ["self", "grads", "trainable_variables", "learning_rate"],
    )(_update_step)


def _strategy_of(optimizer):
    strategy = asynchronous(optimizer._distribution_strategy)
    return strategy if strategy and tf.distribute.get_replica_context() else None


def _apply(original, self, grads, trainable_variables=None):
    strategy = _strategy_of(self)
    known = self._trainable_variables if trainable_variables is None else trainable_variables
    constraints = [
        (variable, variable.constraint)
        for variable in (known if strategy else ())
        if variable.constraint is not None
    ]
    for variable, _ in constraints:
        variable.constraint = None
    try:
        original(self, grads, trainable_variables)
    finally:
        for variable, constraint in constraints:
            variable.constraint = constraint
    constrain(strategy, constraints)


def constrain(strategy, constraints):
    """Has variables satisfy their constraints, beside them.

    Args:
        strategy: `ParameterServerStrategy`.
        constraints: List of pairs of a Keras variable and its constraint.
    """
    for variable, constraint in constraints:
        if isinstance(variable._value, PulledVariable):
            _beside(strategy, variable, lambda v, c: v.assign(c(v)), (variable, constraint))
        else:
            # That of a sharded variable may need all of its rows.
            with exact.raised():
                variable.assign(constraint(variable))


def _update_moving_averages(original, self, trainable_variables):
    strategy = _strategy_of(self)
    if strategy is None or not self.use_ema:
        return original(self, trainable_variables)
    not_first_step = ops.not_equal(self.iterations, 0)
    for variable, average in zip(trainable_variables, self._model_variables_moving_average):
        if average is not None:
            momentum = ops.cast(not_first_step, variable.dtype) * self.ema_momentum
            _beside(strategy, variable, _average, (variable, average, momentum))
    return None


def _average(variable, average, momentum):
    # TensorFlow's variables: of a sharded one these are the shards that are updated now.
    value = momentum * average._value.value() + (1 - momentum) * variable._value.value()
    average._value.assign(value)


def _beside(strategy, variable, update, args):
    """Runs an update on the server, or servers, that a variable lies on."""

    def merged(distribution):
        distribution.extended.update(variable._value, lambda _: update(*args), group=False)

    _merge_call(merged, strategy)


def _update_step(original, self, grads, trainable_variables, learning_rate):
    counted = tally.current()
    if _strategy_of(self) is None or counted is None:
        return original(self, grads, trainable_variables, learning_rate)
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    original(self, grads, trainable_variables, learning_rate)
    counted.waits.note_push(grads, graph.get_operations()[before:])
    return None


def _push_gradients(original, self, grads_and_vars):
    if _strategy_of(self) is None:
        return original(self, grads_and_vars)
    return _push(self, *zip(*grads_and_vars))


def _push(optimizer, gradients, variables):
    if tf.executing_eagerly() or is_applying() or local_copies.are_in_use():
        # On the chief, which keeps nothing; the sums of a step, which are there already; or to a
        # worker's own copies.
        return list(zip(gradients, variables))
    pushes = optimizer._distribution_strategy.extended.pushes

    def step():
        return tf.convert_to_tensor(optimizer.iterations)

    return pushes.send(gradients, variables, step, optimizer)
