"""Sharding of a global batch over replicas, by rows.

The user's batch size is the global one, as in a single process. Replica `r` of `R` takes the rows
from `ceil(r * n / R)` to `ceil((r + 1) * n / R)` of a batch of `n` rows, so that the replicas
together see exactly what one process would see at that step, and no step waits for a message about
data. A replica whose part is empty computes with one row of the batch, which does not count.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import resource_variable_ops

# Padding for replicas without rows: one row, which counts for nothing.
#
# TensorFlow's kernels do not support empty batches: on CPUs, a convolution fused with the operation
# after it returns a tensor of its input's shape. So a replica without rows computes with one, while
# its `local_rows` stay 0: its gradients, metrics, averages and outputs are left out.


class LastRow:
    """Keeps the last row that each local replica had, for when it has none.

    It is a row that the model takes, of the right shape: TensorFlow does not know all of that when
    a worker has run out of data.
    """

    def __init__(self) -> None:
        self._variables: dict[tuple[Any, ...], tf.Variable] = {}

    def padded(self, data: Any, rows: int | tf.Tensor, replica: Any) -> Any:
        """Pads an empty batch of a replica with the last row that it had.

        Returns:
            Structure of tensors with at least one row. It is as in `padded` if there was none
            before, and where tensors are sparse or ragged.
        """
        variables = [
            self._variable((replica, i), leaf) if _is_dense(leaf) else None
            for i, leaf in enumerate(tf.nest.flatten(data))
        ]
        if not isinstance(rows, int):
            data = padded(data, rows, [v if v is None else v.read_value() for v in variables])
        for variable, leaf in zip(variables, tf.nest.flatten(data)):
            if variable is not None:
                variable.assign(leaf[-1:], read_value=False)
        return data

    def _variable(self, place: tuple[Any, int], leaf: tf.Tensor) -> tf.Variable:
        key = *place, leaf.dtype, leaf.shape.rank
        if key not in self._variables:
            with ops.init_scope(), ops.device("/CPU:0"):
                self._variables[key] = resource_variable_ops.ResourceVariable(
                    tf.zeros([1, *(size or 1 for size in leaf.shape[1:])], leaf.dtype),
                    # Batches may differ in all others.
                    shape=[1, *[None] * (leaf.shape.rank - 1)],
                    trainable=False,
                )
        return self._variables[key]


def padded(data: Any, rows: tf.Tensor, instead: Sequence[tf.Tensor | None] | None = None) -> Any:
    """A batch; instead of one of no rows, one of a single row.

    Args:
        instead: For each dense tensor among them, what to put in its place; by default zeros, or
            empty strings.

    """
    leaves = tf.nest.flatten(data)
    instead = [None] * len(leaves) if instead is None else list(instead)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, tf.SparseTensor):
            leaves[i] = _padded_sparse(leaf)
        elif isinstance(leaf, tf.RaggedTensor):
            leaves[i] = _padded_ragged(leaf)
        elif _is_dense(leaf) and instead[i] is None:
            instead[i] = tf.zeros([1, *_sizes_of_row(leaf, tf.shape(leaf))], leaf.dtype)
    places = [i for i, other in enumerate(instead) if other is not None]
    chosen = tf.cond(
        rows > 0,
        lambda: [tf.identity(leaves[i]) for i in places],
        lambda: [tf.identity(instead[i]) for i in places],
    )
    for i, leaf in zip(places, chosen):
        # A dimension known to be 0 is of a batch that TensorFlow has made up.
        leaves[i] = tf.ensure_shape(leaf, [None, *(n or None for n in leaves[i].shape[1:])])
    return tf.nest.pack_sequence_as(data, leaves)


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank)


def _sizes_of_row(leaf: tf.Tensor | tf.SparseTensor, shape: tf.Tensor) -> list[int | tf.Tensor]:
    """Sizes of a tensor's rows, at least 1; ints where they are static."""
    sizes = enumerate(leaf.shape.as_list())
    return [tf.maximum(shape[i], 1) if size is None else size for i, size in sizes][1:]


def _padded_ragged(leaf: tf.RaggedTensor) -> tf.RaggedTensor:
    if leaf.uniform_row_length is not None:
        return leaf
    missing = 1 - tf.minimum(leaf.nrows(), 1)
    splits = tf.concat([leaf.row_splits, leaf.row_splits[-1:][:missing]], 0)
    return tf.RaggedTensor.from_row_splits(leaf.values, splits, validate=False)


def _padded_sparse(leaf: tf.SparseTensor) -> tf.SparseTensor:
    rows = tf.maximum(leaf.dense_shape[0], 1)
    shape = tf.stack([rows, *_sizes_of_row(leaf, leaf.dense_shape)])
    return tf.SparseTensor(leaf.indices, leaf.values, shape)


class Batch(NamedTuple):
    """One replica's shard of a global batch.

    Attributes:
        data: Structure of tensors with `local_rows` rows each, or with one that does not count if
            that is 0.
        local_rows: Scalar int32, the replica's rows.
        global_rows: Scalar int32, rows in the global batch.
    """

    data: Any
    local_rows: Any
    global_rows: Any

    def with_text(self) -> Batch:
        """The batch with its numbers as text, which iterators of GPUs leave on the host."""
        return self._replace(
            local_rows=tf.as_string(self.local_rows), global_rows=tf.as_string(self.global_rows)
        )

    def counts(self) -> list[Any]:
        """Numbers of rows of the replica and of the global batch."""
        with tf.device("CPU:0"):
            return [
                tf.strings.to_number(n, tf.int32) if n.dtype == tf.string else n for n in self[1:]
            ]


class Shards(NamedTuple):
    """The batches of all replicas of this worker, for one step."""

    replicas: tuple[Any, ...]


class World(NamedTuple):
    """Position of this worker's replicas among all replicas.

    Attributes:
        rank: Index of this worker's first replica.
        replicas: Replicas in all.
    """

    rank: int
    local_replicas: int
    replicas: int

    def bounds(self, rows: int | tf.Tensor, local_replica: int) -> tuple[Any, ...]:
        """Row range `[first, end)` of a local replica."""
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

    def span(self, rows: int | tf.Tensor) -> tuple[Any, Any]:
        """First and one past the last row that this worker needs of a batch."""
        return (
            self.padded_bounds(rows, 0)[0],
            self.padded_bounds(rows, self.local_replicas - 1)[1],
        )

    def most_rows(self, batch_size: int, is_even: bool) -> int:
        """Maximum number of rows that this worker needs of any batch.

        The batch has `batch_size` rows, or fewer if it is the last.

        Args:
            is_even: Whether there are no smaller ones.
        """
        # More than with a whole batch: of 7 and 8 rows for five workers, the third has 2 and 1.
        # It is so in each R sizes on end; where replicas have no rows, it is not.
        smallest = batch_size if is_even else max(1, batch_size - 2 * self.replicas)
        spans = [self.span(rows) for rows in range(smallest, batch_size + 1)]
        return int(max(end - first for first, end in spans))


def rows_of(data: Any) -> int | tf.Tensor | None:
    """Number of rows of a structure of tensors: an int if it is static."""
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, tf.RaggedTensor):
            return tf.cast(leaf.nrows(), tf.int32)
        if isinstance(leaf, tf.SparseTensor):
            return tf.cast(leaf.dense_shape[0], tf.int32)
        if tf.is_tensor(leaf) and leaf.shape.rank != 0:
            return leaf.shape[0] if leaf.shape.rank and leaf.shape[0] else tf.shape(leaf)[0]
    return None


class OwnRows(NamedTuple):
    """Row ranges of one worker, for batches that hold only its rows.

    Attributes:
        batch_size: Rows of a global batch.
        is_even: Whether none of them has fewer.
    """

    world: World
    batch_size: int
    is_even: bool

    @property
    def most(self) -> int:
        """Rows that the worker takes, the same of all batches that have as many."""
        return self.world.most_rows(self.batch_size, self.is_even)

    def start(self, rows: int | tf.Tensor) -> Any:
        """The first of them in a batch of `rows` rows."""
        first, _ = self.world.span(rows)
        if isinstance(rows, int):
            return max(0, min(first, rows - self.most))
        return tf.maximum(tf.minimum(first, rows - self.most), 0)

    def split(self, rows: tf.Tensor, data: Any, pads: bool = True) -> Shards:
        """Cuts the worker's rows into its `Shards`, as `split` does with the global batch."""
        of_batch = self.batch_size if self.is_even else rows[0]
        return _shards(data, self.world, of_batch, pads, self.start(of_batch))


def split(data: Any, world: World, pads: bool = True) -> Shards:
    """Cuts a global batch into the `Shards` of this worker.

    Args:
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
        data = padded(data, rows)
    return _shards(data, world, rows, pads)


def _shards(
    data: Any, world: World, rows: int | tf.Tensor, pads: bool, start: int | tf.Tensor = 0
) -> Shards:
    """Makes a worker's `Shards` from data that start at row `start` of the batch."""
    shards = []
    for local_replica in range(world.local_replicas):
        first, end = world.bounds(rows, local_replica)
        local_rows = end - first
        if pads:
            first, end = world.padded_bounds(rows, local_replica)
        part = functools.partial(take, first=first - start, end=end - start)
        shards.append(
            Batch(
                tf.nest.map_structure(part, data),
                tf.cast(local_rows, tf.int32),
                tf.cast(rows, tf.int32),
            )
        )
    return Shards(tuple(shards))


def take(leaf: Any, first: Any, end: Any) -> Any:
    """Slices rows of a tensor, which may be sparse or ragged.

    Scalars, and leaves that are not tensors, are returned unchanged.
    """
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
