"""`optimizer.apply` where `updates=` says when to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keras_psplus.core.base.optimizers import (
    averaged_with_weights,
    unwrapped,
    variables_of_apply,
)

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

    from keras_psplus.all_reduce.step.replica_step import MirroredReplicaStep
    from keras_psplus.all_reduce.step.updating import MirroredUpdates


def apply(
    updating: MirroredUpdates,
    step: MirroredReplicaStep,
    original: Callable[..., Any],
    optimizer: keras.optimizers.Optimizer,
    grads: list[tf.Tensor | tf.IndexedSlices | None],
    trainable_variables: list[keras.Variable] | None,
) -> Any:
    """Gives the gradients of one batch to what says when they are applied.

    Args:
        updating: `all_reduce.step.updating.MirroredUpdates`.
    """
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
        averaged_with_weights(unwrapped(optimizer), updating.policy, variables),
    )
