"""Lookups in mirrored variables that read no more than the rows they are for.

`tf.gather` asks a variable for rows by `sparse_read`. TensorFlow's distributed variables say that
they have none, and are read whole: which is a copy of a whole table at each step, once an update of
rows has been made to it.
"""

import weakref
from typing import Any

import tensorflow as tf

from keras_psplus.tf_internals import distributed_values, values_util


def enable(variable: Any) -> None:
    """Gives a mirrored variable the reads of rows that each of its copies has.

    Args:
        variable: What the strategy has created; others than mirrored ones are left as they are.
    """
    if not isinstance(variable, distributed_values.DistributedVariable):
        return
    if not variable._is_mirrored() or variable._packed_var is not None:
        return
    own = weakref.ref(variable)

    def component():
        if values_util.is_saving_non_distributed():
            return own()._primary
        return own()._get_on_device_or_primary()

    def sparse_read(indices, name=None):
        indices = tf.convert_to_tensor(indices)
        if indices.dtype not in (tf.int32, tf.int64):
            # The kernel that reads whole values takes smaller integers, too.
            indices = tf.cast(indices, tf.int32)
        return component().sparse_read(indices, name=name)

    def gather_nd(indices, name=None):
        return component().gather_nd(indices, name=name)

    variable.sparse_read, variable.gather_nd = sparse_read, gather_nd


def are_enabled(variable: Any) -> bool:
    """Whether `enable` has done so."""
    return "sparse_read" in getattr(variable, "__dict__", {})
