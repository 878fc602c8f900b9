"""Lookups in mirrored variables that read no more than the rows they are for.

`tf.gather` asks a variable for rows by `sparse_read`. TensorFlow's distributed variables say that
they have none, and are read whole: which is a copy of a whole table at each step, once an update of
rows has been made to it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_psplus.engine import Call
from keras_psplus.keras_internals.keras_parts import stateless_scope
from keras_psplus.tf_internals import distributed_values, values_util


class _RowReads:
    """Reads of rows by mirrored variables; see `keras_hooks.variables`."""

    def sparse_read(self, call: Call) -> tf.Tensor:
        """Rows of the copy on this device."""
        indices = tf.convert_to_tensor(call.get("indices"))
        if indices.dtype not in (tf.int32, tf.int64):
            # The kernel that reads whole values takes smaller integers, too.
            indices = tf.cast(indices, tf.int32)
        return _component(call.owner).sparse_read(indices, name=call.get("name"))

    def gather_nd(self, call: Call) -> tf.Tensor:
        """Slices of the copy on this device."""
        return _component(call.owner).gather_nd(call.get("indices"), name=call.get("name"))


_ROW_READS = _RowReads()


def enable(variable: Any) -> None:
    """Gives a mirrored variable the reads of rows that each of its copies has.

    Args:
        variable: What the strategy has created; others than mirrored ones are left as they are.
    """
    if not isinstance(variable, distributed_values.DistributedVariable):
        return
    if variable._is_mirrored() and variable._packed_var is None:
        variable._row_reads = _ROW_READS


def are_enabled(variable: Any) -> bool:
    return "_row_reads" in getattr(variable, "__dict__", {})


def _component(variable: Any) -> tf.Variable:
    if values_util.is_saving_non_distributed():
        return variable._primary
    return variable._get_on_device_or_primary()


def can_read(variable: Any) -> bool:
    """Whether rows of a Keras variable can be read, not only the whole."""
    return not stateless_scope.in_stateless_scope() and are_enabled(variable._value)
