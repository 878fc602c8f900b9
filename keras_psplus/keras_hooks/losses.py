"""Losses: the gradient of a replica's mean counts by its rows.

Stock Keras divides every loss by the number of replicas and sums gradients. That is right for
equal shares only, leaves users' own losses in `train_step` too large by that number, and shows
them in logs too small. Here losses stay what they are in one process, means over the replica's own
rows, and the tape takes their gradients times `local_rows / global_rows`: the sum over replicas is
then the gradient of the mean over the global batch. The gradient of a loss that is not a scalar is
that of its sum, in one process too, and needs no factor.
"""

import keras
import tensorflow as tf
from keras.src import layers, tree
from keras.src.backend.tensorflow import core
from keras.src.losses import loss as loss_module
from keras.src.metrics import reduction_metrics

from keras_psplus.keras_hooks.ownership import our_step
from keras_psplus.keras_hooks.patching import replace
from keras_psplus.parameter_server import shares


def install():
    """Installs this module's hooks."""
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        replace(loss_module, name, ["value"])(_as_it_is)
    replace(loss_module, "reduce_values", ["values", "sample_weight", "reduction"])(_reduce_values)
    replace(loss_module, "apply_mask", ["sample_weight", "mask", "dtype", "reduction"])(_apply_mask)
    replace(reduction_metrics.Mean, "update_state", ["self", "values", "sample_weight"])(
        _update_mean
    )
    if keras.__version__.startswith("3.13."):
        replace(layers.Layer, "__call__", ["self"])(_call_layer)
    replace(
        tf.GradientTape,
        "gradient",
        ["self", "target", "sources", "output_gradients", "unconnected_gradients"],
    )(_gradient)


def _sharing_step():
    """The step of our replica, or of a synchronous worker, if it knows its share of the batch."""
    step = our_step() or shares.current()
    return step if step is not None and step.has_share else None


def _can_sum(step):
    """Whether replicas can ask each other during a step; workers of parameter servers cannot."""
    return not isinstance(step, shares.Share)


def _as_it_is(original, value):
    return original(value) if _sharing_step() is None else value


def _gradient(original, self, target, sources, output_gradients=None, *args, **kwargs):
    step = _sharing_step()
    # Gradients by inputs (of an energy, for a penalty) are a row's own. Given seeds are a chain
    # rule's, as in tf.recompute_grad.
    if (
        step is None
        or output_gradients is not None
        or not any(isinstance(s, (tf.Variable, core.Variable)) for s in tf.nest.flatten(sources))
    ):
        return original(self, target, sources, output_gradients, *args, **kwargs)
    seeds = tf.nest.map_structure(lambda t: _seed(step, t), target)
    return original(self, target, sources, seeds, *args, **kwargs)


def _seed(step, target):
    if not tf.is_tensor(target) or not target.dtype.is_floating or target.shape.rank != 0:
        return None
    return step.by_share(tf.ones_like(target))


def _reduce_values(original, values, sample_weight=None, reduction="sum_over_batch_size"):
    loss = original(values, sample_weight, reduction)
    step = _sharing_step()
    if step is None or reduction in (None, "none"):
        return loss
    if tuple(loss.shape) == (0,):
        # Eagerly, Keras leaves the loss of an empty replica as it is: a vector of no rows.
        loss = tf.reduce_sum(loss)
    if reduction == "sum":
        # Not a mean: the tape's factor must not touch it.
        return step.over_share(loss)
    if reduction == "mean_with_sample_weight" and sample_weight is not None and _can_sum(step):
        # One process would divide by the weight of the whole batch.
        own = tf.cast(tf.reduce_sum(sample_weight), tf.float32)
        everything = step.sum_over_replicas([own])[0]
        factor = tf.cast(tf.math.divide_no_nan(own, everything), loss.dtype)
        return step.over_share(loss * factor)
    return loss


def _apply_mask(original, sample_weight, mask, dtype, reduction):
    weight = original(sample_weight, mask, dtype, reduction)
    step = _sharing_step()
    is_mean = reduction in ("mean", "sum_over_batch_size")
    if step is None or mask is None or not is_mean or not _can_sum(step):
        return weight
    # Keras divides by the replica's own number of unmasked entries; one process would divide by
    # that of the whole batch.
    total = tf.cast(tf.size(mask), tf.float32)
    valid = tf.reduce_sum(tf.cast(mask, tf.float32))
    all_total, all_valid = step.sum_over_replicas([total, valid])
    correction = tf.math.divide_no_nan(all_total * valid, all_valid * total)
    return weight * tf.cast(correction, weight.dtype)


def _update_mean(original, self, values, sample_weight=None):
    step = _sharing_step()
    if step is not None and sample_weight is None:
        values = tf.convert_to_tensor(values)
        if values.shape.rank == 0 and values.dtype.is_floating:
            # A mean over the replica's rows. The batch counts once, as in one process.
            sample_weight = step.by_share(tf.ones([], self.dtype))
    return original(self, values, sample_weight)


def _call_layer(original, self, *args, **kwargs):
    """Keras 3.13 takes activity regularisers' sums over the rows, later versions their means."""
    outputs = original(self, *args, **kwargs)
    step = _sharing_step()
    if step is None or self.activity_regularizer is None:
        return outputs
    # One for each output tensor, added last. Not means: the tape's factor must not touch them.
    count = sum(tf.is_tensor(output) for output in tree.flatten(outputs))
    if count:
        self._losses[-count:] = [step.over_share(loss) for loss in self._losses[-count:]]
    return outputs
