"""Statistics of masked batches over all replicas, for `BatchNormalization(synchronized=True)`.

Keras sums those of batches without a mask over the replicas, and forgets to where there is a mask.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_psplus.engine import Call


def moments(call: Call) -> Any:
    """Mean and variance of the entries that the mask leaves, as Keras's `_moments` has them."""
    layer, inputs, mask = call.owner, call.get("inputs"), call.get("mask")
    context = tf.distribute.get_replica_context()
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
