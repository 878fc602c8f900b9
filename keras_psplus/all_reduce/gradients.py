"""Sums gradients over all replicas, in buckets that overlap with backprop.

One collective for all gradients cannot start before the last of them is ready, and one for each is
dominated by latency. Buckets are filled from the last layer back, the order in which backprop
makes gradients ready, so that the first bucket travels while the rest is computed (Li et al.,
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2).
"""

import numpy as np
import tensorflow as tf

DEFAULT_BUCKET_BYTES = 4 << 20


def all_reduce_sum(launcher, gradients, bucket_bytes=DEFAULT_BUCKET_BYTES):
    """Sums each gradient over all replicas of the launcher's group.

    Args:
        launcher: `collectives.Launcher` of this replica.
        gradients: List of tensors of static shape, or `tf.IndexedSlices`. The same on every
            replica but for the values and, in slices, the number of rows.
        bucket_bytes: Size at which a bucket is sent, in bytes.

    Returns:
        List of summed gradients, bit-identical on all replicas. Slices come back with the rows
        of all replicas, in rank order.
    """
    summed = list(gradients)
    dense = [i for i, g in enumerate(gradients) if not isinstance(g, tf.IndexedSlices)]
    for bucket in _buckets([(i, gradients[i]) for i in reversed(dense)], bucket_bytes):
        indices = [i for i, _ in bucket]
        for i, tensor in zip(indices, pack_and_sum(launcher, [g for _, g in bucket])):
            summed[i] = tensor
    for i, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            summed[i] = launcher.all_reduce_indexed_slices(gradient)
    return summed


def pack_and_sum(launcher, tensors):
    """Sums tensors of one dtype and static shapes over all replicas, by one collective."""
    if len(tensors) == 1:
        return [launcher.all_reduce(tensors[0])]
    sizes = [int(np.prod(t.shape.as_list())) for t in tensors]
    packed = tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)
    pieces = tf.split(launcher.all_reduce(packed), sizes)
    return [tf.reshape(piece, t.shape) for piece, t in zip(pieces, tensors)]


def _buckets(numbered, bucket_bytes):
    """Groups `(index, tensor)` pairs by dtype, in order, closing a bucket once it is full."""
    filling, sizes, full = {}, {}, []
    for pair in numbered:
        dtype = pair[1].dtype
        filling.setdefault(dtype, []).append(pair)
        size = int(np.prod(pair[1].shape.as_list())) * dtype.size
        sizes[dtype] = sizes.get(dtype, 0) + size
        if sizes[dtype] >= bucket_bytes:
            full.append(filling.pop(dtype))
            sizes.pop(dtype)
    return full + list(filling.values())
