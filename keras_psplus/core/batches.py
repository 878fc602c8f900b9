"""How a global batch is split over replicas.

The user's batch size is the global one, as in a single process. Replica `r` of `R` takes the rows
from `ceil(r * n / R)` to `ceil((r + 1) * n / R)` of a batch of `n` rows, so that the replicas
together see exactly what one process would see at that step, and no step waits for a message about
data. A replica whose part is empty computes with one row of the batch, which does not count.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import tensorflow as tf

from keras_psplus.core import padding


class Batch(NamedTuple):
    """What one replica takes of a global batch.

    Attributes:
        data: Structure of tensors with `local_rows` rows each, or with one that does not count if
            that is 0.
        local_rows: Scalar int32, the replica's rows.
        global_rows: Scalar int32, rows in the global batch.
    """

    data: Any
    local_rows: Any
    global_rows: Any


class Shards(NamedTuple):
    """The batches of all replicas of this worker, for one step."""

    replicas: tuple[Any, ...]


class World(NamedTuple):
    """Where this worker's replicas stand among all replicas.

    Attributes:
        rank: Index of this worker's first replica.
        local_replicas: Replicas on this worker.
        replicas: Replicas in all.
    """

    rank: int
    local_replicas: int
    replicas: int

    def bounds(self, rows: int | tf.Tensor, local_replica: int) -> tuple[Any, ...]:
        """First and one past the last row of a local replica; `rows` is an int or a tensor."""
        rank = self.rank + local_replica
        return tuple((r * rows + self.replicas - 1) // self.replicas for r in (rank, rank + 1))

    def padded_bounds(self, rows: int | tf.Tensor, local_replica: int) -> tuple[Any, Any]:
        """As `bounds`, but those of one row of the batch if the replica has none."""
        first, end = self.bounds(rows, local_replica)
        if isinstance(rows, int):
            first = min(first, rows - 1)
            return first, max(end, first + 1)
        first = tf.maximum(tf.minimum(first, rows - 1), 0)
        return first, tf.maximum(end, first + 1)


def rows_of(data: Any) -> int | tf.Tensor | None:
    """Number of rows of a structure of tensors: an int if it is static, else a tensor."""
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, tf.RaggedTensor):
            return tf.cast(leaf.nrows(), tf.int32)
        if isinstance(leaf, tf.SparseTensor):
            return tf.cast(leaf.dense_shape[0], tf.int32)
        if tf.is_tensor(leaf) and leaf.shape.rank != 0:
            return leaf.shape[0] if leaf.shape.rank and leaf.shape[0] else tf.shape(leaf)[0]
    return None


def split(data: Any, world: World, pads: bool = True) -> Shards:
    """Cuts a global batch into the `Shards` of this worker.

    Args:
        data: Structure of tensors.
        world: `World`.
        pads: Whether a replica without rows gets one that does not count.
    """
    rows = rows_of(data)
    if rows is None:
        raise ValueError(
            "A batch must hold at least one tensor with a batch dimension, so that it can be split "
            f"over {world.replicas} replicas. Received: {data}"
        )
    for leaf in tf.nest.flatten(data):
        of_leaf = rows_of(leaf)
        if of_leaf is not None and of_leaf is not rows:
            message = "All parts of a batch must have as many rows, so that it can be split. "
            tf.debugging.assert_equal(of_leaf, rows, f"{message}Received: {data}")
    if pads and not isinstance(rows, int):
        data = padding.padded(data, rows)
    shards = []
    for local_replica in range(world.local_replicas):
        first, end = world.bounds(rows, local_replica)
        local_rows = end - first
        if pads:
            first, end = world.padded_bounds(rows, local_replica)
        part = functools.partial(take, first=first, end=end)
        shards.append(
            Batch(
                tf.nest.map_structure(part, data),
                tf.cast(local_rows, tf.int32),
                tf.cast(rows, tf.int32),
            )
        )
    return Shards(tuple(shards))


def take(leaf: Any, first: Any, end: Any) -> Any:
    """Rows of a tensor, which may be sparse or ragged; what has no rows as it is."""
    if isinstance(leaf, tf.SparseTensor):
        first, size = tf.cast(first, tf.int64), tf.cast(end - first, tf.int64)
        start = tf.concat([[first], tf.zeros_like(leaf.dense_shape[1:])], 0)
        part = tf.sparse.slice(leaf, start, tf.concat([[size], leaf.dense_shape[1:]], 0))
        return tf.SparseTensor(
            part.indices, part.values, tf.concat([[size], leaf.dense_shape[1:]], 0)
        )
    if isinstance(leaf, tf.RaggedTensor) or (tf.is_tensor(leaf) and leaf.shape.rank != 0):
        return leaf[first:end]
    return leaf
