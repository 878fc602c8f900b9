"""Broadcast of values that the chief alone has read from a disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from keras_psplus.all_reduce.collectives.hop import buckets, sum_packed
from keras_psplus.keras_internals.keras_parts import Variable

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher

# The broadcast kernel rejects these dtypes; the wider one holds their values exactly.
WIDER = {
    tf.bool: tf.int32,
    tf.bfloat16: tf.float32,
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
}


def from_chief(
    strategy: tf.distribute.Strategy, variables: Iterable[keras.Variable | tf.Variable]
) -> None:
    """Gives all workers the chief's values of variables."""
    if strategy.extended.control is None:
        return
    with tf.init_scope():
        values = [v._value if isinstance(v, Variable) else v for v in variables]
        strategy.extended.broadcast(values)


def sum_from_chief(
    launcher: Launcher, is_chief: bool, variables: Sequence[tf.Variable], bucket_bytes: int
) -> None:
    """Gives variables the chief's values, in sums to which the other workers add zeros.

    Args:
        launcher: Collectives of all workers.
        variables: List of variables, the same on all workers.
        bucket_bytes: Size in bytes up to which variables share a collective.
    """

    def dtype_of(variable: tf.Variable) -> tf.DType:
        return WIDER.get(variable.dtype, variable.dtype)

    def size_of(variable: tf.Variable) -> int:
        return (variable.shape.num_elements() or 0) * dtype_of(variable).size

    for dtype, bucket in buckets(variables, dtype_of, size_of, bucket_bytes):
        values = [tf.cast(v.read_value(), dtype) for v in bucket]
        if not is_chief:
            values = [tf.zeros_like(value) for value in values]
        for variable, value in zip(bucket, sum_packed(launcher, values)):
            variable.assign(tf.cast(value, variable.dtype))
