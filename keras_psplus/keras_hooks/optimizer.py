"""Optimizers: gradients are summed over replicas before they are clipped.

Stock Keras clips each replica's own gradients and sums them afterwards, which no single process
would do. Reducing where Keras clips also puts the collective inside the branch of gradient
accumulation that updates, so that nothing is sent in between.
"""

import contextlib
import threading

import tensorflow as tf
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.optimizers import base_optimizer, loss_scale_optimizer

from keras_psplus.keras_hooks import updates
from keras_psplus.keras_hooks.ownership import our_step, ours
from keras_psplus.keras_hooks.patching import replace

_local = threading.local()


def install():
    """Installs this module's hooks."""
    for cls in (base_optimizer.BaseOptimizer, loss_scale_optimizer.LossScaleOptimizer):
        replace(cls, "apply", ["self", "grads", "trainable_variables"])(_apply)
    replace(
        base_optimizer.BaseOptimizer,
        "_backend_apply_gradients",
        ["self", "grads", "trainable_variables"],
    )(_apply_gradients)
    replace(base_optimizer.BaseOptimizer, "_clip_gradients", ["self", "grads"])(_clip)
    replace(tf_optimizer.TFOptimizer, "_all_reduce_sum_gradients", ["self", "grads_and_vars"])(
        _all_reduce
    )
    replace(loss_scale_optimizer.LossScaleOptimizer, "check_finite", ["self", "grads"])(
        _check_finite
    )


def _apply(original, self, grads, trainable_variables=None):
    step = our_step()
    if step is None or not step.recording:
        # The inner optimizer of a LossScaleOptimizer gets what that has been given.
        return original(self, grads, trainable_variables)
    grads = step.zero_if_empty(list(grads))
    strategy = ours(self._distribution_strategy)
    updating = strategy.extended.updating if strategy is not None else None
    # An optimizer's state changes alike on all replicas; averaging it would only cost bytes.
    step.recording = False
    try:
        if updating is None:
            return original(self, grads, trainable_variables)
        return updates.apply(original, self, updating, step, grads, trainable_variables)
    finally:
        step.recording = True


def _strategy_in_replica_context(optimizer):
    strategy = ours(optimizer._distribution_strategy)
    return strategy if strategy and tf.distribute.get_replica_context() else None


def _apply_gradients(original, self, grads, trainable_variables):
    with updating(trainable_variables):
        return original(self, grads, trainable_variables)


@contextlib.contextmanager
def updating(variables):
    """Context in which gradients that are clipped are those of these variables."""
    outer, _local.variables = getattr(_local, "variables", None), list(variables)
    try:
        yield
    finally:
        _local.variables = outer


def variables_of_update():
    """The variables whose gradients are being clipped, or an empty list."""
    return getattr(_local, "variables", None) or []


def _clip(original, self, grads):
    strategy = _strategy_in_replica_context(self)
    variables = variables_of_update()
    if strategy is None or not variables or len(variables) != len(grads) or _alone():
        return original(self, grads)
    # Keras has taken out the variables without a gradient.
    grads = [_with_shape(g, v) for g, v in zip(grads, variables)]
    step = tf.cast(tf.convert_to_tensor(self.iterations), tf.int64)
    summed = strategy.extended.reducers.sum(grads, variables, step, owner=self)
    _local.summed_for = self
    return original(self, summed)


def _with_shape(gradient, variable):
    """The gradient with its variable's shape: some reach us without a static one."""
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.ensure_shape(gradient.values, [None, *variable.shape[1:]])
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.ensure_shape(gradient, variable.shape)


def _alone():
    step = our_step()
    return step is not None and step.alone


def _all_reduce(original, self, grads_and_vars):
    if _strategy_in_replica_context(self) and _alone():
        return list(grads_and_vars)
    if _strategy_in_replica_context(self) and getattr(_local, "summed_for", None) is self:
        _local.summed_for = None
        return list(grads_and_vars)
    return original(self, grads_and_vars)


def _check_finite(original, self, grads):
    finite = original(self, grads)
    strategy = _strategy_in_replica_context(self)
    if strategy is None:
        return finite
    # One replica's overflow must skip the step on all: they would take different branches.
    bad = tf.cast(tf.logical_not(finite), tf.float32)
    return tf.equal(strategy.extended.sum_over_replicas([bad])[0], 0.0)
