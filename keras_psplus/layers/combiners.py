"""Sums and means of rows along the last axis of ids."""

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

COMBINERS = "sum", "mean", "sqrtn"


def combine(
    combiner: str | None,
    ids: Any,
    weights: Any,
    lookup: Callable[[tf.Tensor], tf.Tensor],
    dim: int,
    name: str,
) -> Any:
    """Looks ids up, and combines the rows of each group of them.

    Args:
        combiner: One of `COMBINERS`, or None.
        ids: Dense, ragged or sparse tensor.
        weights: The rows' weights, in the same form, or None.
        lookup: Function from a tensor of ids to a matrix of rows.
        name: Name of the layer, for messages.

    Raises:
        ValueError: If ids of this form cannot be combined so.
    """
    if combiner is None:
        return _each(ids, weights, lookup, dim, name)
    if not isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
        if ids.shape.rank == 0:
            raise ValueError(
                f"The layer '{name}' combines the rows of the last axis of its ids, and there is "
                f"none. Received: ids of shape {ids.shape}"
            )
        rows = tf.reshape(lookup(ids), tf.concat([tf.shape(ids), [dim]], 0))
        return _dense(combiner, tf.ensure_shape(rows, [*ids.shape, dim]), weights)
    if isinstance(ids, tf.SparseTensor):
        groups, count, shape = _groups_of_sparse(ids)
        static = ids.shape[:-1]
        values = weights.values if isinstance(weights, tf.SparseTensor) else weights
        flat = ids.values
    else:
        *outer, splits = ids.nested_row_splits
        flat, groups = ids.flat_values, tf.ragged.row_splits_to_segment_ids(splits)
        count = tf.size(splits, splits.dtype) - 1
        values = weights.flat_values if isinstance(weights, tf.RaggedTensor) else weights
        if outer:
            rows = _segments(combiner, lookup(flat), values, groups, count)
            return tf.RaggedTensor.from_nested_row_splits(rows, outer, validate=False)
        shape, static = count[tf.newaxis], ids.shape[:1]
    rows = _segments(combiner, lookup(flat), values, groups, count)
    rows = tf.reshape(rows, tf.concat([shape, tf.constant([dim], shape.dtype)], 0))
    return tf.ensure_shape(rows, [*static, dim])


def _each(
    ids: Any, weights: Any, lookup: Callable[[tf.Tensor], tf.Tensor], dim: int, name: str
) -> Any:
    if isinstance(ids, tf.SparseTensor):
        raise ValueError(
            f"The layer '{name}' needs a combiner for sparse ids, whose gaps have no rows. Give it "
            '`combiner="sum"`, "mean" or "sqrtn". Received: combiner=None'
        )
    if weights is not None:
        raise ValueError(
            f"The layer '{name}' uses weights where it combines rows: give it a combiner. "
            "Received: weights with combiner=None"
        )
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(lookup(ids.flat_values))
    rows = tf.reshape(lookup(ids), tf.concat([tf.shape(ids), [dim]], 0))
    return tf.ensure_shape(rows, [*ids.shape, dim])


def _dense(combiner: str, rows: tf.Tensor, weights: Any) -> tf.Tensor:
    if weights is None:
        total, count = tf.reduce_sum(rows, -2), tf.cast(tf.shape(rows)[-2], rows.dtype)
        if combiner == "sum":
            return total
        static = rows.shape[-2]
        by = count if combiner == "mean" else tf.sqrt(count)
        if static:
            by = tf.constant(static if combiner == "mean" else math.sqrt(static), rows.dtype)
        return tf.math.divide_no_nan(total, by)
    weights = tf.cast(weights, rows.dtype)
    total = tf.reduce_sum(rows * weights[..., tf.newaxis], -2)
    return _divided(combiner, total, lambda w: tf.reduce_sum(w, -1, keepdims=True), weights)


def _segments(
    combiner: str, rows: tf.Tensor, weights: Any, groups: tf.Tensor, count: tf.Tensor
) -> tf.Tensor:
    if weights is None:
        weights = tf.ones([tf.shape(rows)[0]], rows.dtype)
    else:
        weights = tf.cast(weights, rows.dtype)
        rows = rows * weights[:, tf.newaxis]

    def total_of(values: tf.Tensor) -> tf.Tensor:
        return tf.math.unsorted_segment_sum(values, groups, count)

    return _divided(combiner, total_of(rows), lambda w: total_of(w)[:, tf.newaxis], weights)


def _divided(
    combiner: str, total: tf.Tensor, total_of: Callable[[tf.Tensor], tf.Tensor], weights: tf.Tensor
) -> tf.Tensor:
    if combiner == "sum":
        return total
    by = total_of(weights) if combiner == "mean" else tf.sqrt(total_of(tf.square(weights)))
    return tf.math.divide_no_nan(total, by)


def _groups_of_sparse(ids: tf.SparseTensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The group of each value, the number of groups, and the shape that they have."""
    shape = ids.dense_shape[:-1]
    strides = tf.math.cumprod(shape, exclusive=True, reverse=True)
    groups = tf.reduce_sum(ids.indices[:, :-1] * strides, 1)
    return groups, tf.reduce_prod(shape), shape
