"""The best speed-up possible, before accuracy is paid."""

from collections.abc import Generator
from typing import Any

import tensorflow as tf

from keras_psplus.compression.base import Compressor, DType, Payload, Shape, Step


class NoCommunication(Compressor):
    """Sends nothing: shows how fast training were if communication cost no time at all.

    Each worker trains its own model on its share of the data, so its results are of no use.
    `communicates` is False, and `mean` gives a worker its own gradient back; where gradients are
    pushed to a server, `decode` gives zeros, and the variables stay what they are.

    Example:

    >>> keras_psplus.compression.NoCommunication().wire_bytes([1000, 1000], "float32")
    0
    """

    reducible = True
    communicates = False

    def encode(
        self, tensor: tf.Tensor, state: Any, step: Step
    ) -> tuple[tuple[tf.Tensor, ...], Any]:
        return (), state

    def decode(self, payload: Payload, shape: Shape, dtype: DType, step: Step) -> tf.Tensor:
        return tf.zeros(shape, dtype)

    def wire_bytes(self, shape: Shape, dtype: DType, step: int | None = None) -> int:
        return 0

    def encode_rows(self, values: tf.Tensor, step: Step) -> Payload:
        return ()

    def decode_rows(
        self, payload: Payload, row_shape: Shape, dtype: DType, step: Step
    ) -> tf.Tensor:
        return tf.zeros([0, *row_shape], dtype)

    def row_bytes(self, row_shape: Shape, dtype: DType, step: int | None = None) -> int:
        return 0

    def exchange(
        self, tensor: tf.Tensor, state: Any, step: Step
    ) -> Generator[list[tf.Tensor], list[tf.Tensor], tuple[tf.Tensor, Any, Any]]:
        yield []
        return tensor, tensor, state
