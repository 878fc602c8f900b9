"""Sums on GPUs of the dtypes for which TensorFlow has no all-reduce there.

It refuses int32 and bfloat16 ("Collective all-reduce does not support datatype DT_BFLOAT16 on
DEVICE_GPU"), by NCCL and by its own rings; on CPUs it has both.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from keras_psplus.compression import wire

_Collective = Callable[[tf.Tensor], tf.Tensor]
DTYPES = tf.int32, tf.bfloat16


def all_reduce(
    tensor: tf.Tensor,
    replicas: int,
    reduce: _Collective,
    all_to_all: _Collective,
    gather: _Collective,
) -> tf.Tensor:
    """Sums an int32 or bfloat16 tensor over the replicas of a group.

    Integers travel as int64. Floats keep their two bytes: each replica adds up, in float32, the
    elements of one share, and all gather the shares, which is as many bytes as in a ring.

    Args:
        tensor: Tensor of one shape on all replicas.
        reduce: All-reduce of a tensor of another dtype.
        all_to_all: Exchange of rows, one for each replica.
        gather: Concatenation of the replicas' tensors along axis 0.

    Returns:
        Tensor of the same dtype and shape.
    """
    if tensor.dtype == tf.int32:
        return tf.cast(reduce(tf.cast(tensor, tf.int64)), tf.int32)
    if not tensor.shape.num_elements():
        return tf.cast(reduce(tf.cast(tensor, tf.float32)), tf.bfloat16)
    sent = to_shares(tensor, replicas)
    total = sum_of_shares(tf.ensure_shape(all_to_all(sent), sent.shape))
    return from_shares(tf.ensure_shape(gather(total), sent.shape), tensor.shape)


def to_shares(tensor: tf.Tensor, replicas: int) -> tf.Tensor:
    """Cuts a bfloat16 tensor into a row of float32 words for each replica."""
    elements = tensor.shape.num_elements()
    missing = -elements % (2 * replicas)
    flat = tf.concat([tf.reshape(tensor, [-1]), tf.zeros([missing], tensor.dtype)], 0)
    return wire.pack((flat,), replicas)


def sum_of_shares(words: tf.Tensor) -> tf.Tensor:
    """Adds up what `to_shares` has made on each replica; returns a row of words."""
    replicas, size = words.shape
    like = tf.zeros([replicas, 2 * size], tf.bfloat16)
    (shares,) = wire.unpack(words, (like,), replicas)
    return wire.pack((tf.cast(tf.reduce_sum(tf.cast(shares, tf.float32), 0), tf.bfloat16),))


def from_shares(words: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    """The tensor of which rows of words are the shares."""
    rows, size = words.shape
    (flat,) = wire.unpack(words, (tf.zeros([rows * 2 * size], tf.bfloat16),), rows)
    return tf.reshape(flat[: shape.num_elements()], shape)
