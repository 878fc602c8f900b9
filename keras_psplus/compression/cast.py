"""Gradients in a floating type of 16 bits."""

import numpy as np
import tensorflow as tf

from keras_psplus.arguments import flag, shown
from keras_psplus.compression.base import DType, Payload, Shape, Step
from keras_psplus.compression.rows import RowCompressor, rows_and_size
from keras_psplus.native import has_gpus

_DTYPES = ("bfloat16", "float16")


class Cast(RowCompressor):
    """Sends tensors in a floating type of 16 bits, in which they can be all-reduced.

    `"bfloat16"` has the range of float32 and 8 bits of precision. `"float16"` has 11 bits of
    precision; finite numbers that are too large for it are sent as its largest (65504), so that
    only what was infinite or not a number before is so after. Tensors that are in 16 bits already
    are sent as they are.

    Args:
        dtype: `"bfloat16"` or `"float16"`.
        error_feedback: Whether strategies make up for the rounding in later steps.

    Raises:
        ValueError: If `dtype` is another type.

    Example:

    >>> cast = keras_psplus.compression.Cast("bfloat16")
    >>> payload, state = cast.encode(tf.constant([1.0, 1e-3]), cast.init([2], tf.float32), step=0)
    >>> payload[0].dtype
    tf.bfloat16

    Reference: [Micikevicius et al., 2017](https://arxiv.org/abs/1710.03740),
    [Kalamkar et al., 2019](https://arxiv.org/abs/1905.12322) for bfloat16.
    """

    reducible = True
    is_linear = True
    supports_values = True

    def __init__(self, dtype: DType = "bfloat16", error_feedback: bool = False) -> None:
        if not isinstance(dtype, (str, tf.DType, np.dtype)) or dtype not in _DTYPES:
            raise ValueError(f"`dtype` must be one of {_DTYPES}. Received: dtype={shown(dtype)}")
        self.dtype = dtype
        self.error_feedback = flag("error_feedback", error_feedback)

    def encode_rows(self, values: tf.Tensor, step: Step) -> Payload:
        return (saturating_cast(values, self._wire_dtype(values.dtype)),)

    def decode_rows(
        self, payload: Payload, row_shape: Shape, dtype: DType, step: Step
    ) -> tf.Tensor:
        (values,) = payload
        rows, _ = rows_and_size(values)
        return tf.reshape(saturating_cast(values, dtype), [rows, *row_shape])

    def row_bytes(self, row_shape: Shape, dtype: DType, step: int | None = None) -> int:
        size: int = tf.TensorShape(row_shape).num_elements() * self._wire_dtype(dtype).size
        return size

    def _wire_dtype(self, dtype: DType) -> tf.DType:
        wire, dtype = tf.as_dtype(self.dtype), tf.as_dtype(dtype)
        return wire if dtype.size > wire.size else dtype


def saturating_cast(tensor: tf.Tensor, dtype: DType) -> tf.Tensor:
    """Casts floats such that finite numbers stay finite in float16, and others what they are."""
    if tensor.dtype == dtype or tf.as_dtype(dtype) != tf.float16:
        return tf.cast(tensor, dtype)
    limit = tf.constant(tf.float16.max, tensor.dtype)

    def limited() -> tf.Tensor:
        within = tf.raw_ops.ClipByValue(t=tensor, clip_value_min=-limit, clip_value_max=limit)
        return tf.cast(tf.where(tf.math.is_finite(tensor), within, tensor), dtype)

    if has_gpus():
        # The host would have to read from a GPU which branch it is.
        return limited()
    # Two reductions cost less than what is hardly ever needed.
    fits = (tf.reduce_max(tensor) <= limit) & (tf.reduce_min(tensor) >= -limit)
    return tf.cond(fits, lambda: tf.cast(tensor, dtype), limited)
