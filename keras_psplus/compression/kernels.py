"""Compressors whose passes over memory are one, by kernels of the library's own.

Only for graphs that run in the process that makes them: a server has no such kernels.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import tensorflow as tf

from keras_psplus import native
from keras_psplus.compression.base import Compressor, Payload, Shape, Step
from keras_psplus.compression.error_feedback import ErrorFeedback
from keras_psplus.compression.quantize import Int8, Sign
from keras_psplus.compression.sparse import TopK

# What kernels know a format by.
_CODES = {Int8: tf.int8, Sign: tf.int32}


def encode(
    compressor: Compressor, tensor: tf.Tensor, state: Any, step: Step
) -> tuple[tuple[tf.Tensor, ...], Any]:
    """Equivalent of `compressor.encode`, by one kernel if there is one.

    Args:
        tensor: Floating tensor of static shape.
        state: What `init` or the last step returned.
    """
    kernels = _kernels_for_elements(compressor)
    if kernels is None or tensor.dtype != tf.float32:
        return compressor.encode(tensor, state, step)
    assert isinstance(compressor, ErrorFeedback) and isinstance(compressor.inner, TopK)
    count = compressor.inner.count(tensor.shape.num_elements())
    values, low, starts, left = kernels.keras_psplus_take_largest(
        residual=state["residual"], tensor=tensor, count=count
    )
    payload = (values, low, starts) if starts.shape[1] else (values, low)
    return payload, compressor.state_after(payload, left, state)


def add_rows(compressor: Compressor, payload: Payload, row_shape: Shape, step: Step) -> tf.Tensor:
    """Equivalent of `compressor.add_rows`, by one kernel if there is one."""
    kernels = _kernels_for_elements(compressor)
    values, low, *starts = payload
    if kernels is None or values.dtype != tf.float32:
        return compressor.add_rows(payload, row_shape, step)
    starts = starts[0] if starts else tf.zeros([tf.shape(values)[0], 0], tf.int32)
    size = tf.TensorShape(row_shape).num_elements()
    total = kernels.keras_psplus_add_up(values=values, low=low, starts=starts, size=size)
    return tf.reshape(total, row_shape)


def encode_rows(
    compressor: Compressor, rows: tf.Tensor, state: Any, step: Step
) -> tuple[tuple[tf.Tensor, ...], Callable[[Callable[[], tf.Tensor]], Any]]:
    """Encodes the sum of rows and residual by `encode_rows`, in one kernel if possible.

    Args:
        compressor: `Compressor`, perhaps in `ErrorFeedback`.
        state: What `init` or the last step returned.

    Returns:
        The payload, and a function that returns the new state. It is given a function that returns
        what the payload is decoded to, which may not be needed.
    """
    if not isinstance(compressor, ErrorFeedback):
        return compressor.encode_rows(rows, step), lambda decode: state
    inner = compressor.inner
    fits = compressor.is_plain and rows.dtype == tf.float32
    kernels = _kernels_for_blocks(inner) if fits else None
    if kernels is None:
        total = compressor.add(rows, state)
        payload = inner.encode_rows(total, step)
        return payload, lambda decode: compressor.keep(
            rows, total, payload, decode(), state["inner"], state
        )
    assert isinstance(inner, (Int8, Sign))
    codes, scales, left = kernels.keras_psplus_encode_blocks(
        residual=state["residual"], tensor=rows, block=inner.block_size, code=_CODES[type(inner)]
    )
    new_state = compressor.state_after((codes, scales), left, state)
    return (codes, scales), lambda decode: new_state


def decode_rows(compressor: Compressor, payload: Payload, width: int, step: Step) -> tf.Tensor:
    """Equivalent of `compressor.decode_rows` for float32 rows, by one kernel if possible."""
    kernels = _kernels_for_blocks(compressor)
    if kernels is None:
        return compressor.decode_rows(payload, (width,), tf.float32, step)
    return _decoded(kernels, compressor, payload, width, add_up=False)


def decode_sum(
    compressor: Compressor, payload: Payload, width: int, rows: int, step: Step
) -> tf.Tensor:
    """The sum of so many rows that `decode_rows` returns, as a matrix of one row."""
    kernels = _kernels_for_blocks(compressor)
    if kernels is None:
        # For few long rows this is ten times as fast as a reduction over them. As a vector, which
        # graphs cannot make one sum with the residual of, and so round otherwise than kernels.
        decoded = compressor.decode_rows(payload, (width,), tf.float32, step)
        return tf.expand_dims(tf.add_n(tf.unstack(decoded, rows)), 0)
    return _decoded(kernels, compressor, payload, width, add_up=True)


def _decoded(
    kernels: Any, compressor: Compressor, payload: Payload, width: int, add_up: bool
) -> tf.Tensor:
    assert isinstance(compressor, (Int8, Sign))
    codes, scales = payload
    return kernels.keras_psplus_decode_blocks(
        codes=codes, scales=scales, block=compressor.block_size, width=width, sum=add_up
    )


def _kernels_for_blocks(compressor: Compressor) -> ModuleType | None:
    # Of exactly these types: those that are derived from them may do something else.
    fits = type(compressor) in _CODES and not getattr(compressor, "stochastic", False)
    return native.kernels() if fits else None


def _kernels_for_elements(compressor: Compressor) -> ModuleType | None:
    if not isinstance(compressor, ErrorFeedback) or not compressor.is_plain:
        return None
    inner = compressor.inner
    # Those that are derived from it may do something else.
    fits = type(inner) is TopK and not inner.warmup_epochs
    return native.kernels() if fits else None
