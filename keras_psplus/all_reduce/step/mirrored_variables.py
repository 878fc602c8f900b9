"""Mirrored variables: values of the chief for all workers, and reads of single rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus.all_reduce.collectives.hop import buckets, sum_packed
from keras_psplus.engine import Call
from keras_psplus.keras_internals.keras_parts import Variable, stateless_scope
from keras_psplus.tf_internals import distributed_values, values_util

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher


# Broadcast of values that the chief alone has read from a disk.

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
    """Gives variables the chief's values, in sums to which the other workers add zeros."""

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


# Lookups in mirrored variables that read no more than the rows they are for.
#
# `tf.gather` asks a variable for rows by `sparse_read`. TensorFlow's distributed variables say that
# they have none, and are read whole: which is a copy of a whole table at each step, once an update
# of rows has been made to it.


class _RowReads:
    """Reads of rows by mirrored variables; see `keras_hooks.variables`."""

    def sparse_read(self, call: Call) -> tf.Tensor:
        indices = tf.convert_to_tensor(call.get("indices"))
        if indices.dtype not in (tf.int32, tf.int64):
            # The kernel that reads whole values takes smaller integers, too.
            indices = tf.cast(indices, tf.int32)
        return _component(call.owner).sparse_read(indices, name=call.get("name"))

    def gather_nd(self, call: Call) -> tf.Tensor:
        return _component(call.owner).gather_nd(call.get("indices"), name=call.get("name"))


_ROW_READS = _RowReads()


def enable_row_reads(variable: Any) -> None:
    """Gives a mirrored variable the reads of rows that each of its copies has."""
    if not isinstance(variable, distributed_values.DistributedVariable):
        return
    if variable._is_mirrored() and variable._packed_var is None:
        variable._row_reads = _ROW_READS


def has_row_reads(variable: Any) -> bool:
    return "_row_reads" in getattr(variable, "__dict__", {})


def _component(variable: Any) -> tf.Variable:
    if values_util.is_saving_non_distributed():
        return variable._primary
    return variable._get_on_device_or_primary()


def can_read_rows(variable: Any) -> bool:
    """Whether rows of a Keras variable can be read, not only the whole."""
    return not stateless_scope.in_stateless_scope() and has_row_reads(variable._value)
