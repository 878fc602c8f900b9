"""Sums of products: the factors of all replicas, gathered and multiplied on each.

The number of rows may differ between replicas and from step to step, and all must choose the same
way, so they tell each other first, once for all products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from keras_psplus import compression
from keras_psplus.all_reduce.collectives.operations import Launcher
from keras_psplus.all_reduce.collectives.size_classes import padded_size

if TYPE_CHECKING:
    from keras_psplus.compression.factors.outer_products import OuterProduct


def most_rows(launcher: Launcher, products: Sequence[OuterProduct]) -> list[tf.Tensor]:
    """Largest number of rows of each product on any replica, on the host."""
    # Of what went into layers: this waits for no gradient. On a GPU, shapes are on the host anyway.
    rows = [tf.shape(product.left)[0] for product in products]
    with launcher.separate_order("factors rows"), tf.device("CPU:0"):
        counts = launcher.gather(tf.stack(rows))
        return tf.unstack(tf.reduce_max(tf.reshape(counts, [-1, len(products)]), 0))


def sum_of_outer_products(
    launcher: Launcher,
    replicas: int,
    compressor: compression.SufficientFactors,
    product: OuterProduct,
    most: tf.Tensor,
    shape: tf.TensorShape,
    whole_sum: Callable[[tf.Tensor], tf.Tensor],
    name: str,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Sums a matrix that each replica has as a product.

    Args:
        product: `compression.factors.outer_products.OuterProduct` of this replica.
        most: Rows of the replica that has the most, of `most_rows`.
        shape: Static shape of the matrix.
        whole_sum: Function that sums a matrix over replicas, for those with too many rows, and
            returns the sum.
        name: Of the matrix, the same on all replicas.

    Returns:
        The sum; how many bytes this replica has for each of the others; and how many it sends.
    """
    sent = compressor.factor_bytes(shape, tf.cast(tf.shape(product.left)[0], tf.int64))

    def gathered(factor: tf.Tensor, columns: int, side: str) -> tuple[tf.Tensor, int]:
        payload = (tf.ensure_shape(factor, [None, columns]),)
        if compressor.inner is not None:
            payload = compressor.inner.encode_rows(*payload, step=None)
        words = compression.pack(payload, tf.shape(factor)[0])
        with launcher.separate_order(f"{name} {side}"):
            words = launcher.gather_padded(words, most)
        factors = compression.unpack(words, payload, tf.shape(words)[0])
        return tf.reshape(tf.cast(factors[0], tf.float32), [-1, columns]), words.shape[1]

    def of_factors() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        left, left_words = gathered(product.left, shape[0], "left")
        right, right_words = gathered(product.right, shape[1], "right")
        padded = sum(padded_size(most * words) for words in (left_words, right_words))
        wire = 4 * (replicas - 1) * tf.cast(padded, tf.int64)
        return tf.matmul(left, right, transpose_a=True), sent, wire

    def of_wholes() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        whole = compressor.wire_bytes(shape, tf.float32)
        wire = round(2 * (replicas - 1) * whole / replicas)
        with launcher.separate_order(f"{name} whole"):
            total = whole_sum(product.whole())
        return total, tf.constant(whole, tf.int64), tf.constant(wire, tf.int64)

    total, *counted = tf.cond(most <= compressor.most_rows(shape, replicas), of_factors, of_wholes)
    return tf.ensure_shape(total, shape), *counted
