"""Compressors whose passes over memory are one, by kernels of the library's own.

Only for graphs that run in the process that makes them: a server has no such kernels.
"""

import tensorflow as tf

from keras_psplus import native
from keras_psplus.compression.error_feedback import ErrorFeedback
from keras_psplus.compression.sparsify import TopK


def encode(compressor, tensor, state, step):
    """What `compressor.encode` returns, by one kernel if there is one.

    Args:
        compressor: `Compressor`.
        tensor: Floating tensor of static shape.
        state: What `init` or the last step returned.
        step: int64 scalar.

    Returns:
        The payload and the new state.
    """
    kernels = _kernels_for(compressor)
    if kernels is None or tensor.dtype != tf.float32:
        return compressor.encode(tensor, state, step)
    count = compressor.inner.count(tensor.shape.num_elements())
    values, low, starts, left = kernels.keras_psplus_take_largest(
        residual=state["residual"], tensor=tensor, count=count
    )
    payload = (values, low, starts) if starts.shape[1] else (values, low)
    return payload, compressor.state_after(payload, left, state)


def add_rows(compressor, payload, row_shape, step):
    """What `compressor.add_rows` returns, by one kernel if there is one."""
    kernels = _kernels_for(compressor)
    values, low, *starts = payload
    if kernels is None or values.dtype != tf.float32:
        return compressor.add_rows(payload, row_shape, step)
    starts = starts[0] if starts else tf.zeros([tf.shape(values)[0], 0], tf.int32)
    size = tf.TensorShape(row_shape).num_elements()
    total = kernels.keras_psplus_add_up(values=values, low=low, starts=starts, size=size)
    return tf.reshape(total, row_shape)


def _kernels_for(compressor):
    fits = isinstance(compressor, ErrorFeedback) and compressor.is_plain
    # Those that are derived from it may do something else.
    fits = fits and type(compressor.inner) is TopK and not compressor.inner.warmup_epochs
    return native.kernels() if fits else None
