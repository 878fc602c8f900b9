"""Tensors that are sent as they are, beside others that are compressed."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_psplus import compression


class IdentityCompressor(compression.Compressor):
    """Sends a tensor as it is, together with others that are compressed."""

    reducible = True

    def encode(
        self, tensor: tf.Tensor, state: Any, step: tf.Tensor
    ) -> tuple[tuple[tf.Tensor, ...], Any]:
        return (tensor,), state

    def decode(
        self, payload: tuple[tf.Tensor, ...], shape: Any, dtype: tf.DType, step: tf.Tensor
    ) -> tf.Tensor:
        return payload[0]

    def wire_bytes(self, shape: Any, dtype: tf.DType, step: int | None = None) -> int:
        return tf.TensorShape(shape).num_elements() * tf.as_dtype(dtype).size


IDENTITY = IdentityCompressor()
