"""Optimizers under `ParameterServerStrategy` whose gradients wait on the workers.

Keras's own `gradient_accumulation_steps` keeps its sums where the variables are, so that each batch
would send its gradients to be added, and the update would bring the sums back. Here they stay on
the worker as well.
"""

import tensorflow as tf
from keras.src import ops
from keras.src.optimizers import base_optimizer, loss_scale_optimizer

from keras_psplus import repeated_rows
from keras_psplus.keras_hooks import parameter_server_optimizer, updates
from keras_psplus.keras_hooks.ownership import asynchronous
from keras_psplus.keras_hooks.patching import replace
from keras_psplus.parameter_server import local_copies, updating
from keras_psplus.parameter_server.local_rounds import Members


def install():
    """Installs this module's hooks."""
    for cls in (base_optimizer.BaseOptimizer, loss_scale_optimizer.LossScaleOptimizer):
        replace(cls, "apply", ["self", "grads", "trainable_variables"])(_apply)
    replace(
        base_optimizer.BaseOptimizer,
        "_backend_apply_gradients",
        ["self", "grads", "trainable_variables"],
    )(_apply_gradients)


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


def alone(strategy, model, step):
    """A model's step as a worker takes it alone, if `updates` says so; else as it is."""
    if strategy.updates is None or not strategy.updates.local:
        return step

    def step_alone(batch):
        optimizers = [one for one in updates.optimizers_of(model).values() if one.built]
        members, seen = {}, set()
        for one in optimizers:
            members[one] = _members(one, strategy.updates, seen)
        constraints = [
            (variable, variable.constraint)
            for one in optimizers
            for variable in one._trainable_variables
            if variable.constraint is not None
        ]

        def satisfied(weights):
            known = {id(weight) for weight in weights}
            own = [(v, c) for v, c in constraints if id(v._value) in known]
            # A mean of weights that satisfy a constraint need not.
            parameter_server_optimizer.constrain(strategy, own)

        with strategy.updating.alone(members, satisfied):
            return step(batch)

    return step_alone


def _members(optimizer, policy, seen):
    # A weight that two optimizers change has one copy.
    weights = [v for v in optimizer._trainable_variables if id(v) not in seen]
    seen.update(id(variable) for variable in weights)
    averages = list(optimizer._model_variables_moving_average) if optimizer.use_ema else []
    averages = [variable for variable in averages if variable is not None]
    sums = optimizer._accumulated_gradients if optimizer.gradient_accumulation_steps else []
    others = [*averages, *sums, optimizer._iterations]
    slots = [
        variable
        for variable in optimizer.variables
        if variable.value.dtype.is_floating
        and variable.name != "learning_rate"
        and all(variable is not other for other in others)
    ]
    if policy.average_slots:
        shapes = {tuple(variable.shape) for variable in optimizer._trainable_variables}
        averages += [slot for slot in slots if tuple(slot.shape) in shapes]
        slots = [slot for slot in slots if tuple(slot.shape) not in shapes]
    kinds = weights, averages, slots, [optimizer._iterations]
    return Members(*([variable._value for variable in kind] for kind in kinds))


def _check_that_it_is_alone(optimizer, variables):
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    for variable in [*variables, inner._iterations]:
        value = variable._value
        if local_copies.handle_of(getattr(value, "shards", [value])[0]) is None:
            raise ValueError(
                "With `updates=LocalSGD(...)` under parameter servers, an optimizer has to be an "
                "attribute of the model, built before the first step, and applied by the "
                "`train_step` of `fit`: its variables are copied to the workers. "
                f"Received: {optimizer.name} and the variable '{variable.path}'"
            )


def _apply(original, self, grads, trainable_variables=None):
    strategy = _strategy_of(self)
    if strategy is None or strategy.updates is None or updating.is_applying():
        return original(self, grads, trainable_variables)
    variables = updates.variables_of_apply(self, strategy.updates, grads, trainable_variables)
    if variables is None:
        return original(self, grads, trainable_variables)
    if strategy.updates.local:
        _check_that_it_is_alone(self, variables)
        return original(self, grads, variables)
    return strategy.updating.take(self, list(grads), variables)


def _with_distinct_rows(gradient):
    return repeated_rows.summed(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def _apply_gradients(original, self, grads, trainable_variables):
    strategy = _strategy_of(self)
    if strategy is None or not self.gradient_accumulation_steps:
        return original(self, grads, trainable_variables)

    def update(means, variables):
        # Keras's sums are whole tensors: a row that came twice is one there.
        means = self._clip_gradients([_with_distinct_rows(mean) for mean in means])
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
