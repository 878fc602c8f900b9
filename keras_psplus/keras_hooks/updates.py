"""Optimizers of strategies with `updates=`: when they step, and what the end of an epoch does."""

import keras
from keras.src import backend
from keras.src.trainers import trainer

from keras_psplus.keras_hooks import checks
from keras_psplus.keras_hooks.ownership import asynchronous, distributing
from keras_psplus.keras_hooks.patching import replace
from keras_psplus.thread_flag import ThreadFlag

# Raised while metrics are those of an evaluation.
evaluating = ThreadFlag()


def install():
    """Installs this module's hooks."""
    replace(trainer.Trainer, "_get_metrics_result_or_logs", ["self", "logs"])(_end_of_epoch)


def variables_of_apply(optimizer, updates, grads, trainable_variables):
    """The variables of a call of `optimizer.apply`, which is built and fit for `updates`.

    Returns:
        List of variables, or None if the call has no gradients, or too little to build by.
    """
    if trainable_variables is None:
        if not optimizer.built:
            return None
        trainable_variables = optimizer._trainable_variables
    variables = list(trainable_variables)
    if not optimizer.built:
        # Before any branch of the graph: variables are made outside of them.
        with backend.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
    if all(gradient is None for gradient in grads):
        return None
    # Of optimizers that compile() was not given.
    checks.check_accumulation(updates, optimizer)
    checks.check_accumulation(updates, getattr(optimizer, "inner_optimizer", optimizer))
    return variables


def apply(original, optimizer, updating, step, grads, trainable_variables):
    """`optimizer.apply` where it is for `updating` to say when."""
    variables = variables_of_apply(optimizer, updating.policy, grads, trainable_variables)
    if variables is None:
        return original(optimizer, grads, trainable_variables)
    updating.prepare(optimizer, optimizer._trainable_variables)
    return updating.apply(
        step,
        optimizer,
        grads,
        variables,
        lambda g, v: original(optimizer, g, v),
        _averaged(getattr(optimizer, "inner_optimizer", optimizer), updating.policy, variables),
    )


def prepare(strategy, model):
    """Makes what the optimizers of a built model need before their first step."""
    if strategy.updates is not None:
        for optimizer in optimizers_of(model).values():
            if optimizer.built:
                strategy.extended.updating.prepare(optimizer, optimizer._trainable_variables)


def settle(strategy, model):
    """Gives all workers the same weights, or servers theirs, if they step alone; on all workers."""
    if strategy is not None and strategy.updates is not None and strategy.updates.local:
        updating = _updating_of(strategy)
        # Also those that are no attributes, or of the model that this one is a part of.
        others = updating.training(model.trainable_variables)
        for optimizer in [*optimizers_of(model).values(), *others]:
            updating.finish(optimizer)


def optimizers_of(model):
    """All optimizers that are attributes of a model, or in lists or dicts that are, by names.

    Those of models that it is made of are found, too.
    """
    found = {}
    for name, one in _found(model):
        inner = getattr(one, "inner_optimizer", one)
        if all(inner is not other for other in found.values()):
            found[name] = inner
    return found


def variables_of_optimizers(model):
    """All variables of a model's optimizers and of what wraps them, each of them once."""
    return list({id(v): v for _, one in _found(model) for v in one.variables}.values())


def _found(model):
    for number, layer in enumerate(model._flatten_layers()):
        for name, value in vars(layer).items():
            name = f"{name}_of_layer_{number}" if number else name
            if isinstance(value, dict):
                value = list(value.values())
            for i, one in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                if isinstance(one, keras.optimizers.Optimizer):
                    yield f"{name}_{i}" if i else name, one


def _end_of_epoch(original, self, logs):
    strategy = distributing(getattr(self, "_distribute_strategy", None))
    # Keras asks for an epoch's metrics before validation and before callbacks see its end.
    if strategy is not None and not evaluating:
        settle(strategy, self)
        if getattr(strategy.updates, "flush", False):
            updating = _updating_of(strategy)
            for optimizer in optimizers_of(self).values():
                updating.finish(optimizer)
    return original(self, logs)


def _updating_of(strategy):
    return strategy.updating if asynchronous(strategy) else strategy.extended.updating


def _averaged(optimizer, policy, variables):
    """What of an optimizer's variables is averaged with the weights of workers that step alone."""
    if not policy.local:
        return []
    averaged = list(optimizer._model_variables_moving_average) if optimizer.use_ema else []
    if policy.average_slots:
        shapes = {tuple(variable.shape) for variable in variables}
        # Neither counters nor the learning rate, which are the same everywhere.
        averaged += [
            v
            for v in optimizer.variables
            if v.value.dtype.is_floating
            and tuple(v.shape) in shapes
            and v.name != "learning_rate"
            and all(v is not one for one in averaged)
        ]
    return averaged
