"""Optimizers of a model, and the variables that a strategy needs of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus.core.base import checks, reached
from keras_psplus.keras_internals.keras_parts import backend

if TYPE_CHECKING:
    from keras_psplus.updates import Updates

_NO_NUMBERS = tf.string, tf.resource, tf.variant


def variables_of_apply(
    optimizer: keras.optimizers.Optimizer,
    updates: Updates | None,
    grads: Sequence[tf.Tensor | tf.IndexedSlices | None],
    trainable_variables: Iterable[keras.Variable] | None,
) -> list[keras.Variable] | None:
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
    checks.check_accumulation(updates, unwrapped(optimizer))
    return variables


def optimizers_of(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """All optimizers that a model and its methods reach, by names; without their wrappers."""
    found: dict[str, keras.optimizers.Optimizer] = {}
    for name, one in reached_optimizers(model).items():
        inner = unwrapped(one)
        if all(inner is not other for other in found.values()):
            found[name] = inner
    return found


def steps_of(model: keras.Model) -> int:
    """Sum of the steps that a model's optimizers have made."""
    return sum(int(one.iterations.numpy()) for one in optimizers_of(model).values())


def reached_optimizers(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """All optimizers that a model and its methods reach, by names; wrappers as they are."""
    return {name: one for name, one, _ in reached.objects_of(model) if _is_optimizer(one)}


def variables_of_optimizers(model: keras.Model) -> list[keras.Variable]:
    """All variables of a model's optimizers and of what wraps them, each of them once."""
    every = (v for one in reached_optimizers(model).values() for v in one.variables)
    return list({id(v): v for v in every}.values())


def unwrapped(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer that a `LossScaleOptimizer` wraps, or the same."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def iterations_of(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    """Number of an optimizer's updates, an int64 scalar."""
    return tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.int64)


def other_variables(model: keras.Model) -> dict[str, keras.Variable | tf.Variable]:
    """Variables that a model reaches, by names, but which Keras does not save with it."""
    found, known = {}, [*model.variables, *model.metrics_variables]
    for name, one, is_attribute in reached.objects_of(model):
        if _is_optimizer(one):
            if is_attribute:
                known += [*one.variables, *unwrapped(one).variables]
                continue
            of_one = [*one.variables, *unwrapped(one).variables]
        else:
            of_one = one.variables if isinstance(one, keras.metrics.Metric) else [one]
        found.update({f"{name}/{i}": variable for i, variable in enumerate(of_one)})
    seen, others = {id(v) for v in known}, {}
    for name, variable in found.items():
        if id(variable) not in seen and tf.as_dtype(variable.dtype) not in _NO_NUMBERS:
            seen.add(id(variable))
            others[name] = variable
    return others


def _is_optimizer(one: object) -> bool:
    return isinstance(one, keras.optimizers.Optimizer)


def averaged_with_weights(
    optimizer: keras.optimizers.Optimizer, policy: Any, variables: Sequence[keras.Variable]
) -> list[keras.Variable]:
    """Optimizer variables that are averaged with the weights of workers that step alone."""
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
