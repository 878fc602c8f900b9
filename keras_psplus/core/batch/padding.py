"""Padding for replicas without rows: one row, which counts for nothing.

TensorFlow's kernels do not support empty batches: on CPUs, a convolution fused with the operation
after it returns a tensor of its input's shape. So a replica without rows computes with one, while
its `local_rows` stay 0: its gradients, metrics, averages and outputs are left out.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import resource_variable_ops


class LastRow:
    """Keeps the last row that each local replica had, for when it has none.

    It is a row that the model takes, of the right shape: TensorFlow does not know all of that when
    a worker has run out of data.
    """

    def __init__(self) -> None:
        self._variables: dict[tuple[Any, ...], tf.Variable] = {}

    def padded(self, data: Any, rows: int | tf.Tensor, replica: Any) -> Any:
        """Pads an empty batch of a replica with the last row that it had.

        Args:
            data: Structure of tensors.
            rows: How many rows that are: an int or a tensor.
            replica: What tells this replica from the others of this process.

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
        data: Structure of tensors.
        rows: Scalar tensor, the number of rows.
        instead: For each dense tensor among them, what to put in its place; by default zeros, or
            empty strings.

    Returns:
        Structure of tensors with at least one row.
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
        # What is known to be 0 is of a batch that TensorFlow has made up.
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
