"""Numbers of shards of variables too large to be sent in one tensor.

TensorFlow sends no tensor of 2 GiB between tasks. A larger shard could be trained by rows, but
neither be read as a whole nor saved.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

Shape: TypeAlias = tf.TensorShape | Sequence[int]
DType: TypeAlias = tf.DType | str
# Above this, a variable is made here and not by TensorFlow, which would send it whole.
LARGE_BYTES = 1 << 30
# Of what a task can send at once, with room for what goes with it.
MOST_BYTES = (1 << 31) - (1 << 20)


def size_of(shape: Shape, dtype: DType) -> int:
    """Bytes of a variable."""
    return tf.TensorShape(shape).num_elements() * tf.as_dtype(dtype).size


def offsets_of(shape: Shape, dtype: DType, shards: int, keeps_whole: bool) -> list[int]:
    """The first rows of a large variable's shards, and the number of all.

    With `keeps_whole`, shards of more than `LARGE_BYTES` stay so if they can be sent.
    """
    return offsets_of_rows(shape[0], row_bytes_of(shape, dtype), shards, keeps_whole)


def row_bytes_of(shape: Shape, dtype: DType) -> int:
    """Bytes of a variable's row; raises ValueError if that is too large to be sent."""
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
    kwargs: Mapping[str, Any], shape: Shape | None
) -> tuple[tf.TensorShape | None, DType | None]:
    """Shape and dtype of a variable to be made; None unless both are known."""
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
