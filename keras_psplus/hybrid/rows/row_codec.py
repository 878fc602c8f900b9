"""Rows of tables on the wire: words of float32, whatever they are compressed to."""

from typing import Any

import tensorflow as tf

from keras_psplus import compression
from keras_psplus.arguments import shown
from keras_psplus.compression import wire
from keras_psplus.core.batch.traffic import TensorTraffic

# gRPC refuses messages of more than 4 MiB, and TensorFlow's RPC operations cannot be told
# otherwise. What is not rows takes little.
MESSAGE_BYTES = (4 << 20) - (64 << 10)

_ALLOWED = (
    'None, "bf16", "fp16", "int8", `Cast`, `Int8`, or a compressor of your own with `encode_rows` '
    "and `supports_values = True`"
)


class RowCodec:
    """Turns rows into words and back, each row by itself.

    Args:
        compressor: `Compressor` whose `encode_rows` serves, or None for rows as they are.
        dim: Numbers in a row.
        id_bytes: Bytes that a row's number, or its key, may take beside it.
    """

    def __init__(
        self, compressor: compression.Compressor | None, dim: int, id_bytes: int = 5
    ) -> None:
        self._compressor = compressor
        self._dim, self._id_bytes = dim, id_bytes
        self._like: Any = None
        self.width = dim
        if compressor is not None:
            with tf.init_scope():
                self._like = compressor.encode_rows(tf.zeros([1, dim]), tf.constant(0, tf.int64))
                self.width = int(wire.pack(self._like, 1).shape[1])

    @property
    def rows_per_message(self) -> int:
        """Rows per message, each with its number or key."""
        return MESSAGE_BYTES // (4 * self.width + self._id_bytes)

    def traffic(self, path: str, direction: str, ids: tf.Tensor) -> TensorTraffic:
        """Bytes of a table's rows, each of which travels with its number.

        Args:
            path: Name of the table.
            direction: As of `Traffic`.
            ids: Numbers or keys of the rows.
        """
        compressor, count = self._compressor, tf.size(ids, tf.int64)
        name = None if compressor is None else repr(compressor)
        with tf.device("CPU:0"):
            logical, sent, wire_bytes = (
                count * (4 * words) for words in (self._dim, self.width, self.width + 1)
            )
        return TensorTraffic(path, name, logical, sent, wire_bytes, direction=direction)

    def encode(self, rows: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """float32 rows of shape `(n, dim)` as words of shape `(n, width)`."""
        if self._compressor is None:
            return rows
        payload = self._compressor.encode_rows(rows, step)
        return tf.ensure_shape(wire.pack(payload, tf.shape(rows)[0]), [None, self.width])

    def decode(self, words: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """The inverse of `encode`, but for what is lost."""
        if self._compressor is None:
            return words
        payload = wire.unpack(words, self._like, tf.shape(words)[0])
        rows = self._compressor.decode_rows(payload, (self._dim,), tf.float32, step)
        return tf.reshape(rows, [-1, self._dim])


def compressor_for_rows(
    argument: str, value: str | compression.Compressor | None
) -> compression.Compressor | None:
    """Converts a user's compression argument for rows to a `Compressor` or None.

    Raises:
        ValueError: If it does nothing for rows, or leaves out what nobody sends later.
    """
    compressor = compression.get(value, argument, _ALLOWED)
    if compressor is None:
        return None
    inner = getattr(compressor, "inner", compressor)
    by_rows = type(inner).encode_rows is not compression.Compressor.encode_rows
    if not by_rows or not inner.supports_values:
        raise ValueError(
            f"`{argument}` must keep every number of a row nearly as it is, as rows have no "
            f"residual: {_ALLOWED}. Received: {argument}={shown(value)}"
        )
    return inner
