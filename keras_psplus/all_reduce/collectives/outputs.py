"""Outputs of `predict`, gathered from all replicas: dense, ragged and sparse tensors, strings."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_psplus.all_reduce.collectives.operations import Launcher

# There is no operation that makes a string of bytes.
_BYTES = [bytes([number]) for number in range(256)]


def gather_rows(launcher: Launcher, rank: int, value: Any) -> Any:
    """Concatenates the replicas' rows in rank order, in graph mode.

    Args:
        launcher: Collectives of a local replica.
        rank: Its rank among all replicas.
        value: Tensor, `tf.RaggedTensor` or `tf.SparseTensor` of the replica.

    Returns:
        The same kind, with the rows of all replicas.
    """
    if isinstance(value, tf.RaggedTensor):
        lengths = [gather_rows(launcher, rank, each) for each in value.nested_row_lengths()]
        flat = gather_rows(launcher, rank, value.flat_values)
        return tf.RaggedTensor.from_nested_row_lengths(flat, lengths, validate=False)
    if isinstance(value, tf.SparseTensor):
        shapes = gather_rows(launcher, rank, value.dense_shape[tf.newaxis])
        first = tf.reduce_sum(shapes[:rank, 0])
        indices = value.indices + tf.one_hot(0, value.shape.rank, on_value=first, dtype=tf.int64)
        shape = tf.concat([[tf.reduce_sum(shapes[:, 0])], tf.reduce_max(shapes[:, 1:], 0)], 0)
        return tf.SparseTensor(
            gather_rows(launcher, rank, indices), gather_rows(launcher, rank, value.values), shape
        )
    if value.shape.rank == 0:
        value = value[tf.newaxis]
    if value.dtype == tf.string:
        return _gather_strings(launcher, value)
    return launcher.gather_rows(value)[0]


def _gather_strings(launcher: Launcher, value: tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(value, [-1])
    lengths, _ = launcher.gather_rows(tf.strings.length(flat))
    rows, _ = launcher.gather_rows(tf.shape(value)[:1])
    own = tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8)
    codes, _ = launcher.gather_rows(own)
    characters = tf.gather(tf.constant(_BYTES), tf.cast(codes, tf.int32))
    texts = tf.strings.reduce_join(
        tf.RaggedTensor.from_row_lengths(characters, lengths, validate=False), axis=-1
    )
    shape = tf.concat([[tf.reduce_sum(rows)], tf.shape(value)[1:]], 0)
    return tf.ensure_shape(tf.reshape(texts, shape), [None, *value.shape[1:]])
