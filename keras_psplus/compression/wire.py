"""Payloads as words that TensorFlow's collectives can carry.

There are no collectives for integers of 8 and 16 bits, and no gather for bfloat16; and one message
is cheaper than several. So what is gathered or exchanged travels as float32 words, bit by bit.
Only what is added up on its way has to keep its type.
"""

from collections.abc import Sequence

import tensorflow as tf


def pack(payload: Sequence[tf.Tensor], rows: int | tf.Tensor = 1) -> tf.Tensor:
    """Packs the tensors of a payload side by side into float32 words, bit by bit.

    Args:
        payload: Tuple of tensors of 1, 2, 4 or 8 bytes for each element.
        rows: For a payload of `encode_rows`: the number of rows, each of which is packed by itself.
            An int, or an int32 scalar if it is not known.

    Returns:
        float32 tensor of shape `(rows, words)`. Each tensor's row is filled up to whole words.

    Example:

    >>> words = pack((tf.constant([1, 2, 3], tf.int8), tf.constant([0.5])))
    >>> words.shape
    TensorShape([1, 2])
    """
    return tf.concat([_to_words(tensor, rows) for tensor in payload] or [tf.zeros([rows, 0])], 1)


def unpack(
    words: tf.Tensor, like: Sequence[tf.Tensor], rows: int | tf.Tensor = 1
) -> tuple[tf.Tensor, ...]:
    """The inverse of `pack`.

    Args:
        words: What `pack` returned, perhaps on another worker.
        like: A payload of the same dtypes and shapes, such as the one of this worker. With `rows`
            as a scalar tensor, only the shapes of single rows count.
        rows: How many rows there are, as for `pack`.

    Returns:
        Tuple of tensors.
    """
    payload, start = [], 0
    for tensor in like:
        size = _row_size(tensor, rows)
        count = -(-size * tensor.dtype.size // 4)
        payload.append(_from_words(words[:, start : start + count], tensor, rows, size))
        start += count
    return tuple(payload)


def _to_words(tensor: tf.Tensor, rows: int | tf.Tensor) -> tf.Tensor:
    size = _row_size(tensor, rows)
    if tensor.dtype.size >= 4:
        # Never reshaped as int32, which GPUs do in the host's memory.
        words = tensor if tensor.dtype == tf.float32 else tf.bitcast(tensor, tf.float32)
        return tf.reshape(words, [rows, size * tensor.dtype.size // 4])
    flat = tf.reshape(tensor, [rows, size])
    # As bytes first: there is no kernel to pad some of the small types.
    octets = tf.reshape(tf.bitcast(flat, tf.uint8), [rows, size * tensor.dtype.size])
    missing = -size * tensor.dtype.size % 4
    octets = tf.pad(octets, [[0, 0], [0, missing]])
    words = (size * tensor.dtype.size + missing) // 4
    return tf.bitcast(tf.reshape(octets, [rows, words, 4]), tf.float32)


def _from_words(
    words: tf.Tensor, like: tf.Tensor, rows: int | tf.Tensor, size: int | tf.Tensor
) -> tf.Tensor:
    shape = _shape(like, rows)
    width = like.dtype.size
    if like.dtype == tf.float32:
        return tf.reshape(words, shape)
    if width == 8:
        return tf.reshape(tf.bitcast(tf.reshape(words, [rows, size, 2]), like.dtype), shape)
    if width == 4:
        # See `_to_words`.
        return tf.bitcast(tf.reshape(words, shape), like.dtype)
    octets = tf.reshape(tf.bitcast(words, tf.uint8), [rows, -(-size * width // 4) * 4])
    octets = octets[:, : size * width]
    if width > 1:
        octets = tf.reshape(octets, [rows, size, width])
    return tf.reshape(tf.bitcast(octets, like.dtype), shape)


def _row_size(tensor: tf.Tensor, rows: int | tf.Tensor) -> int | tf.Tensor:
    """The number of elements in a row, as an int if it is known."""
    if not isinstance(rows, int):
        size = tensor.shape[1:].num_elements()
        return tf.reduce_prod(tf.shape(tensor)[1:]) if size is None else size
    size = tensor.shape.num_elements()
    return (tf.size(tensor) if size is None else size) // rows


def _shape(like: tf.Tensor, rows: int | tf.Tensor) -> tf.TensorShape | tf.Tensor:
    if not isinstance(rows, int):
        return tf.concat([[rows], tf.shape(like)[1:]], 0)
    return like.shape if like.shape.is_fully_defined() else tf.shape(like)
