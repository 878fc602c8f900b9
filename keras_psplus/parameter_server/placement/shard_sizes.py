"""Numbers of shards of variables too large to be sent in one tensor.

TensorFlow sends no tensor of 2 GiB between tasks. A larger shard could be trained by rows, but
neither be read as a whole nor saved.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# Above this, a variable is made here and not by TensorFlow, which would send it whole.
LARGE_BYTES = 1 << 30
# Of what a task can send at once, with room for what goes with it.
MOST_BYTES = (1 << 31) - (1 << 20)


def size_of(shape: tf.TensorShape | Sequence[int], dtype: tf.DType | str) -> int:
    """Bytes of a variable."""
    return tf.TensorShape(shape).num_elements() * tf.as_dtype(dtype).size


def offsets_of(
    shape: tf.TensorShape | Sequence[int], dtype: tf.DType | str, shards: int, keeps_whole: bool
) -> list[int]:
    """The first rows of a large variable's shards.

    Args:
        shape: The variable's shape.
        dtype: Its type.
        shards: How many shards it would have by the partitioner.
        keeps_whole: Whether shards of more than `LARGE_BYTES` stay as they are as long as they can
            be sent.

    Returns:
        List of numbers of rows, of which the last is that of all rows.

    Raises:
        ValueError: If a row is too large.
    """
    return offsets_of_rows(shape[0], row_bytes_of(shape, dtype), shards, keeps_whole)


def row_bytes_of(shape: tf.TensorShape | Sequence[int], dtype: tf.DType | str) -> int:
    """Bytes of a variable's row.

    Raises:
        ValueError: If that is too large.
    """
    row_bytes = size_of(shape[1:], dtype)
    if row_bytes > MOST_BYTES:
        raise ValueError(
            "A variable on parameter servers is cut along its first axis into parts of less than "
            "2 GiB. Give it another shape, or make it smaller. "
            f"Received: shape={tuple(shape)}, dtype={tf.as_dtype(dtype).name}"
        )
    return row_bytes


def offsets_of_rows(rows: int, row_bytes: int, shards: int, keeps_whole: bool) -> list[int]:
    """As `offsets_of`, for so many rows of so many bytes."""
    shards = min(shards, rows)
    most = MOST_BYTES if keeps_whole else LARGE_BYTES
    if -(-rows // shards) * row_bytes > most:
        shards = max(shards, -(-rows // max(1, LARGE_BYTES // row_bytes)))
    base, extra = divmod(rows, shards)
    return [i * base + min(i, extra) for i in range(shards + 1)]


def form_of(
    kwargs: Mapping[str, Any], shape: tf.TensorShape | Sequence[int] | None
) -> tuple[tf.TensorShape | None, tf.DType | str | None]:
    """Shape and dtype of a variable before its creation.

    Args:
        kwargs: The arguments that it is made with.
        shape: Its shape, if Keras has said so.

    Returns:
        Its shape and its type; None for both unless both are known.
    """
    value, dtype = kwargs.get("initial_value"), kwargs.get("dtype")
    if isinstance(value, (tf.Tensor, np.ndarray)):
        shape, dtype = value.shape, dtype or value.dtype
    elif shape is None:
        shape = kwargs.get("shape")
    if shape is None or dtype is None or not tf.TensorShape(shape).is_fully_defined():
        return None, None
    return tf.TensorShape(shape), dtype


def size_if_known(kwargs: Mapping[str, Any]) -> int:
    """Bytes of a variable before its creation; 0 if its shape is not known yet."""
    shape, dtype = form_of(kwargs, None)
    return 0 if shape is None or dtype is None else size_of(shape, dtype)
