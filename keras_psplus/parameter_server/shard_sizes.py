"""How many shards a large variable needs: TensorFlow sends no tensor of 2 GiB between tasks.

A larger shard could be trained by rows, but neither be read as a whole nor saved.
"""

from collections.abc import Sequence

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
    rows = shape[0]
    row_bytes = size_of(shape[1:], dtype)
    if row_bytes > MOST_BYTES:
        raise ValueError(
            "A variable on parameter servers is cut along its first axis into parts of less than "
            "2 GiB. Give it another shape, or make it smaller. "
            f"Received: shape={tuple(shape)}, dtype={tf.as_dtype(dtype).name}"
        )
    shards = min(shards, rows)
    most = MOST_BYTES if keeps_whole else LARGE_BYTES
    if -(-rows // shards) * row_bytes > most:
        shards = max(shards, -(-rows // max(1, LARGE_BYTES // row_bytes)))
    base, extra = divmod(rows, shards)
    return [i * base + min(i, extra) for i in range(shards + 1)]
