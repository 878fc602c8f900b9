"""What a worker function sends to the parameter servers."""

import tensorflow as tf

from keras_psplus.parameter_server.pulls import SMALL_BYTES, PulledVariable, size_in_bytes


def pack(gradients, variables):
    """Sends the gradients of small variables to each server in one message.

    Args:
        gradients: List of tensors, `tf.IndexedSlices` or None, on the worker.
        variables: Their variables.

    Returns:
        The gradients, those of small variables on their variables' servers.
    """
    packed, groups = list(gradients), {}
    for i, (gradient, variable) in enumerate(zip(gradients, variables)):
        if (
            isinstance(gradient, tf.Tensor)
            and isinstance(variable, PulledVariable)
            and size_in_bytes(variable) <= SMALL_BYTES
        ):
            groups.setdefault((variable.device, gradient.dtype), []).append(i)
    for (device, _), places in groups.items():
        flat = tf.concat([tf.reshape(gradients[i], [-1]) for i in places], 0)
        with tf.device(device):
            parts = tf.split(flat, [variables[i].shape.num_elements() for i in places])
            for i, part in zip(places, parts):
                packed[i] = tf.reshape(part, variables[i].shape)
    return packed
