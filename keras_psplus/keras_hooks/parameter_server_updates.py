"""Optimizers under `ParameterServerStrategy` whose gradients wait on the workers.

Keras's own `gradient_accumulation_steps` keeps its sums where the variables are, so that each batch
would send its gradients to be added, and the update would bring the sums back. Here they stay on
the worker as well.
"""

import tensorflow as tf
from keras.src import backend, ops
from keras.src.optimizers import base_optimizer, loss_scale_optimizer
from keras.src.trainers import trainer

from keras_psplus.keras_hooks import checks, step_registry, updates
from keras_psplus.keras_hooks.ownership import asynchronous
from keras_psplus.keras_hooks.patching import replace
from keras_psplus.parameter_server import updating


def install():
    """Installs this module's hooks."""
    for cls in (base_optimizer.BaseOptimizer, loss_scale_optimizer.LossScaleOptimizer):
        replace(cls, "apply", ["self", "grads", "trainable_variables"])(_apply)
    replace(
        base_optimizer.BaseOptimizer,
        "_backend_apply_gradients",
        ["self", "grads", "trainable_variables"],
    )(_apply_gradients)
    replace(trainer.Trainer, "_get_metrics_result_or_logs", ["self", "logs"])(_end_of_epoch)


def _strategy_of(optimizer):
    """The strategy if the optimizer is called in a function for a worker that steps by itself."""
    strategy = asynchronous(optimizer._distribution_strategy)
    is_on_worker = (
        strategy is not None
        and strategy.mode == "async"
        and tf.distribute.get_replica_context() is not None
        and not tf.executing_eagerly()
    )
    return strategy if is_on_worker else None


def _apply(original, self, grads, trainable_variables=None):
    strategy = _strategy_of(self)
    if strategy is None or strategy.updates is None or updating.is_applying():
        return original(self, grads, trainable_variables)
    if trainable_variables is None:
        if not self.built:
            return original(self, grads)
        trainable_variables = self._trainable_variables
    variables = list(trainable_variables)
    if not self.built:
        # Before any branch of the graph: variables are made outside of them.
        with backend.name_scope(self.name, caller=self):
            self.build(variables)
    if all(gradient is None for gradient in grads):
        return original(self, grads, variables)
    # Of optimizers that compile() was not given.
    checks.check_accumulation(strategy.updates, self)
    checks.check_accumulation(strategy.updates, getattr(self, "inner_optimizer", self))
    return strategy.updating.take(self, list(grads), variables)


def _apply_gradients(original, self, grads, trainable_variables):
    strategy = _strategy_of(self)
    if strategy is None or not self.gradient_accumulation_steps:
        return original(self, grads, trainable_variables)

    def update(means, variables):
        means = self._clip_gradients(means)
        self._apply_weight_decay(variables)
        self._backend_update_step(means, variables, self.learning_rate)

    # The counters of Keras are those of all workers together: each counts its own batches.
    strategy.updating.accumulate(
        self, self.gradient_accumulation_steps, grads, trainable_variables, update
    )
    if not self.use_ema:
        return None
    self._update_model_variables_moving_average(self._trainable_variables)
    if self.ema_overwrite_frequency:
        should_overwrite = (self.iterations + 1) % self.ema_overwrite_frequency == 0
        ops.cond(
            should_overwrite,
            lambda: self._overwrite_model_variables_with_average_value(self._trainable_variables),
            lambda: None,
        )
    return None


def _end_of_epoch(original, self, logs):
    strategy = asynchronous(getattr(self, "_distribute_strategy", None))
    # Keras asks for an epoch's metrics before validation and before callbacks see its end.
    if getattr(strategy and strategy.updates, "flush", False) and not updates.is_evaluating():
        step_registry.drain(strategy)
        for optimizer in updates.optimizers_of(self).values():
            strategy.updating.finish(optimizer)
    return original(self, logs)
