"""Payloads: encoded and decoded by kernels of the library's own, and packed into words.

Kernels make one pass over memory. They are only for graphs that run in the process that makes
them: a server has no such kernels.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf

from keras_psplus import native
from keras_psplus.compression.base import Compressor, Payload, Shape, Step
from keras_psplus.compression.error_feedback import ErrorFeedback
from keras_psplus.compression.quantize import Int8, Sign
from keras_psplus.compression.sparse import TopK

# Types by which kernels know a format.
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


# Payloads as words that TensorFlow's collectives can carry: there are none for integers of 8 and 16
# bits, and no gather for bfloat16, and one message is cheaper than several. What is gathered or
# exchanged travels as float32 words, bit by bit; only what is added up on its way keeps its type.


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
