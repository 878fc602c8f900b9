"""Losses in one replica's step: means over its rows, whose gradients count by its rows.

The gradient of a loss that is not a scalar is that of its sum, in one process too, and needs no
factor. See `keras_hooks/training.py` for what stock Keras does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.batch.replica_step import (
    ReplicaStep,
    current_step,
    current_step_with_batch_fraction,
)
from keras_psplus.core.graph import metrics
from keras_psplus.engine import Call
from keras_psplus.keras_internals.keras_parts import Variable, tree
from keras_psplus.updates import map_values

_SUMS_ACTIVITY = keras.__version__.startswith("3.13.")


def scale(call: Call) -> Any:
    """A loss as it is, where the step knows its fraction of the batch."""
    return call.proceed() if current_step_with_batch_fraction() is None else call.owner


def gradient(call: Call) -> Any:
    """Gradients by variables of a replica's mean, times its fraction of the batch."""
    step = current_step_with_batch_fraction()
    # Gradients by inputs (of an energy, for a penalty) are a row's own. Given seeds are a chain
    # rule's, as in tf.recompute_grad.
    if step is None or not is_by_variables(call):
        return call.proceed()
    target, seeds = call.get("target"), call.get("output_gradients")
    targets = tf.nest.flatten(target)
    given = [None] * len(targets) if seeds is None else tf.nest.flatten(seeds)
    for i, one in enumerate(targets):
        if is_mean(one) or step.is_of_batch(one):
            seed = tf.ones_like(one) if given[i] is None else given[i]
            given[i] = step.scale_by_batch_fraction(seed)
    return call.proceed(output_gradients=tf.nest.pack_sequence_as(target, given))


def is_by_variables(call: Call) -> bool:
    """Whether gradients are by variables, and no link of a chain rule."""
    step = current_step_with_batch_fraction()
    sources = tf.nest.flatten(call.get("sources"))
    if not any(isinstance(source, (tf.Variable, Variable)) for source in sources):
        return False
    if call.get("output_gradients") is None:
        return True
    return step is not None and all(map(step.is_of_batch, tf.nest.flatten(call.get("target"))))


def gradient_of_own_mean(call: Call) -> Any:
    """Gradients of a mean over the replica's rows, scaled by its batch fraction."""
    step = current_step_with_batch_fraction()
    assert step is not None
    seeds = tf.nest.map_structure(
        lambda t: None if is_mean(t) else step.unscale_by_batch_fraction(tf.ones_like(t)),
        call.get("target"),
    )
    return call.proceed(output_gradients=seeds)


def note_gradients(
    call: Call, grads: Any, step: ReplicaStep, note: Callable[..., list[Any]]
) -> Any:
    """Notes a replica's parts of gradients by variables; others belong to single rows.

    Args:
        grads: What the tape has returned, scaled by the batch fraction.
        note: Function of gradients and their variables that returns what stands for them.
    """
    target, sources = call.get("target"), call.get("sources")
    flat, found = tf.nest.flatten(sources), tf.nest.flatten(grads)
    trained = [i for i, one in enumerate(flat) if isinstance(one, (Variable, tf.Variable))]
    if all(is_mean(one) or step.is_of_batch(one) for one in tf.nest.flatten(target)):
        unscale = step.unscale_by_batch_fraction
        found = [g if i in trained else map_values(unscale, g) for i, g in enumerate(found)]
    given = note([found[i] for i in trained], [flat[i] for i in trained])
    for i, one in zip(trained, given):
        found[i] = one
    return tf.nest.pack_sequence_as(sources, found)


def is_mean(target: Any) -> bool:
    """Whether a tape's target is a mean over rows, not a loss per row."""
    return bool(tf.is_tensor(target) and target.dtype.is_floating and target.shape.rank == 0)


def reduce_values(call: Call) -> tf.Tensor:
    """A loss whose gradients, times the replica's fraction, add up to those of one process."""
    loss = call.proceed()
    sample_weight = call.get("sample_weight")
    reduction = call.get("reduction", "sum_over_batch_size")
    step = current_step_with_batch_fraction()
    if step is None or reduction in (None, "none"):
        return loss
    known = step.metric_losses
    if not known.are_local:
        loss = _of_batch(step, loss, sample_weight, reduction)
        return known.note(loss, lambda: loss)
    correction = known.take_correction()

    def of_batch() -> tf.Tensor:
        corrected = loss if correction is None else loss * tf.cast(correction(), loss.dtype)
        return _of_batch(step, corrected, sample_weight, reduction)

    return known.note(loss, of_batch)


def _of_batch(
    step: ReplicaStep, loss: tf.Tensor, sample_weight: Any, reduction: str | None
) -> tf.Tensor:
    if tuple(loss.shape) == (0,):
        # Eagerly, Keras leaves the loss of an empty replica as it is: a vector of no rows.
        loss = tf.reduce_sum(loss)
    if reduction == "sum":
        # Not a mean: the tape's factor must not touch it.
        return step.unscale_by_batch_fraction(loss)
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        # One process would divide by the weight of the whole batch.
        own = tf.cast(tf.reduce_sum(sample_weight), tf.float32)
        everything = step.sum_over_replicas([own])[0]
        factor = tf.cast(tf.math.divide_no_nan(own, everything), loss.dtype)
        return step.unscale_by_batch_fraction(loss * factor)
    return loss


def apply_mask(call: Call) -> Any:
    """Weights by which a masked mean counts as in the mean over the whole batch."""
    weight, mask, reduction = call.proceed(), call.get("mask"), call.get("reduction")
    step = current_step_with_batch_fraction()
    is_mean = reduction in ("mean", "sum_over_batch_size")
    if step is None or mask is None or not is_mean:
        return weight

    def correction() -> tf.Tensor:
        # Keras divides by the replica's own number of unmasked entries; one process would divide
        # by that of the whole batch.
        total = tf.cast(tf.size(mask), tf.float32)
        valid = tf.reduce_sum(tf.cast(mask, tf.float32))
        all_total, all_valid = step.sum_over_replicas([total, valid])
        return tf.math.divide_no_nan(all_total * valid, all_valid * total)

    if step.metric_losses.are_local:
        step.metric_losses.correction = correction
        return weight
    return weight * tf.cast(correction(), weight.dtype)


def update_mean(call: Call) -> Any:
    """Weights a mean over the replica's rows by its fraction of the batch.

    The batch counts once, as in one process.
    """
    step = current_step_with_batch_fraction()
    if step is None or call.get("sample_weight") is not None:
        return call.proceed()
    values = tf.convert_to_tensor(call.get("values"))
    if not _is_number(values):
        return call.proceed(values=values)
    of_batch = step.metric_losses.of_batch(values)
    values = values if of_batch is None else of_batch
    # A mean over the replica's rows. The batch counts once, as in one process.
    fraction = step.scale_by_batch_fraction(tf.ones([], call.owner.dtype))
    return call.proceed(values=values, sample_weight=fraction)


def update_sum(call: Call) -> Any:
    """A loss of the batch is added once, not once by each replica."""
    step = current_step_with_batch_fraction()
    if step is None or call.get("sample_weight") is not None:
        return call.proceed()
    values = tf.convert_to_tensor(call.get("values"))
    of_batch = step.metric_losses.of_batch(values) if _is_number(values) else None
    values = values if of_batch is None else step.scale_by_batch_fraction(of_batch)
    return call.proceed(values=values)


def _is_number(values: tf.Tensor) -> bool:
    return bool(values.shape.rank == 0 and values.dtype.is_floating)


def get_attribute(call: Call) -> Any:
    """A metric's attribute; in its `update_state`, losses are those of the replica's own rows."""
    attribute, name = call.proceed(), call.get("name")
    if name == "result":
        step = current_step()
        return attribute if step is None else step.result_of(call.owner, attribute)
    step = current_step_with_batch_fraction() if name == "update_state" else None
    if step is None:
        return attribute
    return metrics.update_state(step.metric_losses, call.owner, attribute)


def call_layer(original: Callable[..., Any], layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
    """Keras 3.13 takes activity regularisers' sums over the rows, later versions their means."""
    outputs = original(layer, *args, **kwargs)
    step = None
    if _SUMS_ACTIVITY and layer.activity_regularizer is not None:
        step = current_step_with_batch_fraction()
    if step is None:
        return outputs
    # One for each output tensor, added last. Not means: the tape's factor must not touch them.
    count = sum(tf.is_tensor(output) for output in tree.flatten(outputs))
    if count:
        layer._losses[-count:] = [
            step.unscale_by_batch_fraction(loss) for loss in layer._losses[-count:]
        ]
    return outputs


# Statistics of masked batches over all replicas, for `BatchNormalization(synchronized=True)`.
#
# Keras sums those of batches without a mask over the replicas, and forgets to where there is a
# mask.


def moments(call: Call) -> Any:
    """Mean and variance of the entries that the mask leaves, as Keras's `_moments` has them."""
    layer, inputs, mask = call.owner, call.get("inputs"), call.get("mask")
    context, step = tf.distribute.get_replica_context(), current_step_with_batch_fraction()
    if layer.synchronized and step is not None and not step.can_sum:
        raise ValueError(
            'With `mode="sync"`, workers cannot ask each other within a step, and no statistics '
            "are of all their rows. Leave `synchronized=True` out, so that each takes those of its "
            "own rows, or use MultiWorkerMirroredStrategy or HybridStrategy. "
            f"Received: the layer '{layer.name}' with synchronized=True"
        )
    if mask is None or not layer.synchronized or context is None:
        return call.proceed()
    is_there = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))

    def masked(values: Any) -> Any:
        return tf.where(is_there, values, tf.zeros_like(values))

    def sums(*values: Any) -> Any:
        local = [tf.reduce_sum(one, layer._reduction_axes, True) for one in values]
        return context.all_reduce(tf.distribute.ReduceOp.SUM, local)

    total, count = sums(masked(inputs), tf.cast(is_there, inputs.dtype))
    count += keras.backend.epsilon()
    mean = total / count
    # Squares of differences, as in one process: they lose less than differences of squares. They
    # are masked first, so that entries that are no numbers have no gradients either.
    (squares,) = sums(tf.square(masked(inputs - mean)))
    return tf.squeeze(mean), tf.squeeze(squares / count)
