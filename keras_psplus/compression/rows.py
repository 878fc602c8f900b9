"""Compressors that treat a tensor as one row, and rows each by itself."""

from typing import Any

import tensorflow as tf

from keras_psplus.compression.base import Compressor, DType, Payload, Shape, Step
from keras_psplus.compression.options import check_floating, size_of


class RowCompressor(Compressor):
    """A compressor without state that treats a tensor as one row.

    Subclasses give `encode_rows`, `decode_rows` and `row_bytes`. Payloads of `encode` have a
    leading axis of 1, so that those of several workers, joined along it, can be decoded as rows.
    """

    supports_reduce_scatter = True

    def encode(
        self, tensor: tf.Tensor, state: Any, step: Step
    ) -> tuple[tuple[tf.Tensor, ...], Any]:
        check_floating(tensor)
        return self.encode_rows(tf.reshape(tensor, [1, size_of(tensor.shape)]), step), state

    def decode(self, payload: Payload, shape: Shape, dtype: DType, step: Step) -> tf.Tensor:
        return tf.reshape(self.decode_rows(payload, (size_of(shape),), dtype, step), shape)

    def wire_bytes(self, shape: Shape, dtype: DType, step: int | None = None) -> int:
        # Refuses what `row_bytes` cannot count.
        size_of(shape)
        return self.row_bytes(shape, dtype, step)


def rows_and_size(values: tf.Tensor) -> tuple[int | tf.Tensor, int]:
    """Number of rows, an int if it is static, and of elements per row."""
    rows = values.shape[0] if values.shape[0] is not None else tf.shape(values)[0]
    return rows, values.shape[1:].num_elements()
