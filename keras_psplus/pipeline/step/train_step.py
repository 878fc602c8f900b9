"""Keras's train step, taken micro-batch by micro-batch.

The loss and the gradients of each micro-batch are computed as soon as its outputs are there, so
that a stage can let go of its activations. The sums of gradients are those of the batch's loss, and
metrics see the outputs of the whole batch, as in Keras's own step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.batch.replica_step import current_step
from keras_psplus.keras_internals.keras_parts import (
    BaseTrainer,
    TensorFlowTrainer,
    get_keras_mask,
    tree,
    unpack_x_y_sample_weight,
)
from keras_psplus.pipeline.base import gradients

# Losses of Keras that compare the rows of a batch, or divide by sums over them.
_COUPLING = ("Circle", "Dice", "Tversky")
_REDUCTIONS = ("sum", "mean", "sum_over_batch_size", "mean_with_sample_weight")


def why_not_divided(model: keras.Model) -> str | None:
    """Reason why a model's train step needs whole batches; None if it does not."""
    for name, owner in (
        ("train_step", TensorFlowTrainer),
        ("compute_loss", BaseTrainer),
        ("_compute_loss", BaseTrainer),
    ):
        if getattr(getattr(model, name), "__func__", None) is not getattr(owner, name):
            return f"it has its own `{name.lstrip('_')}`, which sees whole batches"
    for loss in tree.flatten(model.loss):
        if getattr(loss, "ignore_class", None) is not None:
            return f"its loss {loss!r} is divided by the number of entries that are not ignored"
        if loss is not None and not _is_mean_of_rows(loss):
            return f"its loss {loss!r} may compare the rows of a batch"
    return None


def _is_mean_of_rows(loss: Any) -> bool:
    """Whether a loss is known to be computed for each row by itself."""
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    if isinstance(loss, keras.losses.Loss):
        if type(loss).__name__ in _COUPLING or loss.reduction not in _REDUCTIONS:
            return False
        loss = getattr(loss, "fn", type(loss))
    name = getattr(loss, "__name__", "")
    is_kerass = getattr(loss, "__module__", "").startswith("keras.src.losses")
    return is_kerass and name.title() not in _COUPLING


def step_of(model: keras.Model) -> Callable[[Any], Any]:
    """The train step of a model.

    Args:
        model: Keras model for which `why_not_divided` is None.

    Returns:
        Function of a batch that returns logs. It is called in a `PipelineStep`.
    """

    def train_step(data: Any) -> Any:
        step: Any = current_step()
        x, y, sample_weight = unpack_x_y_sample_weight(data)
        weights = model.trainable_weights
        rows = step.rows_of(data)
        outputs, losses, sizes = [], [], []
        # By pipeline.
        sums: dict[int, list[Any]] = {}
        for part in step.microbatches(rows, model):
            own = step.take((x, y, sample_weight), rows, part)
            with part:
                output, loss, grads = _forward_and_backward(model, part, weights, own)
            outputs.append(output)
            losses.append(loss * part.fraction)
            before = sums.get(part.pipeline)
            sums[part.pipeline] = (
                grads if before is None else [gradients.add(a, b) for a, b in zip(before, grads)]
            )
            sizes.append(part.end - part.first)
        step.finish_sums()
        y_pred = step.join(model.name, outputs, sizes)
        loss = tf.add_n(losses)
        model._loss_tracker.update_state(
            loss, sample_weight=tf.shape(next(i for i in tree.flatten(x) if i is not None))[0]
        )
        if weights:
            total = step.over_pipelines.total(weights, sums)
            model.optimizer.apply_gradients(zip(total, weights))
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    return train_step


def _forward_and_backward(
    model: keras.Model, part: Any, weights: list[keras.Variable], data: tuple[Any, Any, Any]
) -> tuple[Any, tf.Tensor, list[Any]]:
    """Outputs, loss, and gradients of a micro-batch, times its part of the batch's rows."""
    x, y, sample_weight = data
    with tf.GradientTape() as tape:
        y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
        if any(get_keras_mask(leaf) is not None for leaf in tree.flatten(y_pred)):
            raise ValueError(
                f"The outputs of the model '{model.name}' have masks in training, by whose number "
                'of entries the loss of the batch is divided. Pass `schedule="gpipe"` to the '
                "strategy, which sees whole batches. Received: schedule='1f1b'"
            )
        # Keras counts means by rows where their number is known, and else by batches.
        step: Any = current_step()
        y_pred = tree.map_structure(step.as_the_batch, y_pred)
        loss = model._compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
        )
        scaled = loss if model.optimizer is None else model.optimizer.scale_loss(loss)
    seed = tf.cast(part.fraction, scaled.dtype)
    return y_pred, loss, tape.gradient(scaled, weights, output_gradients=seed)
