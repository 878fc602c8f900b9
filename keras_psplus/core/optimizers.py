"""Optimizers of a model, and the variables that a strategy needs of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_psplus.core import checks
from keras_psplus.keras_parts import backend

if TYPE_CHECKING:
    import tensorflow as tf

    from keras_psplus.updates import Updates


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
    checks.check_accumulation(updates, getattr(optimizer, "inner_optimizer", optimizer))
    return variables


def optimizers_of(model: keras.Model) -> dict[str, keras.optimizers.Optimizer]:
    """All optimizers in a model's attributes, by name.

    Lists and dicts of optimizers are searched, and so are nested models.

    Those of models that it is made of are found, too.
    """
    found: dict[str, keras.optimizers.Optimizer] = {}
    for name, one in _found(model):
        inner = getattr(one, "inner_optimizer", one)
        if all(inner is not other for other in found.values()):
            found[name] = inner
    return found


def optimizers_of_step(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Optimizers that are a model's own attributes, and those that they wrap."""
    found = [one for name, one in _found(model) if "_of_layer_" not in name]
    return [*found, *(one.inner_optimizer for one in found if hasattr(one, "inner_optimizer"))]


def variables_of_optimizers(model: keras.Model) -> list[keras.Variable]:
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
