"""Keras variables of our strategies are looked up by rows.

`tf.gather` asks its argument for `sparse_read`, which Keras's variables do not have: each lookup
reads the whole value. Of a table on parameter servers that would be far too much to send; of one on
the workers it is a copy, once the optimizer has updated it by rows.
"""

import tensorflow as tf
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
from keras.src.backend.tensorflow import core
from keras.src.backend.tensorflow import numpy as tf_numpy

from keras_psplus.all_reduce import row_reads
from keras_psplus.hybrid.variable import TableVariable
from keras_psplus.keras_hooks.parameter_server_variables import on_ps
from keras_psplus.keras_hooks.patching import replace


def install():
    """Installs this module's hooks."""
    core.Variable.sparse_read = _sparse_read
    # Keras's own would read the whole value for its shape.
    replace(tf_numpy, "take", ["x", "indices", "axis"])(_take)


def _sparse_read(self, indices, name=None):
    if not _reads_rows(self):
        # As if Keras's variables had no such method: tf.gather reads the whole value then.
        raise AttributeError("sparse_read")
    return self._maybe_autocast(self._value.sparse_read(indices, name=name))


def _take(original, x, indices, axis=None):
    if axis != 0 or not isinstance(x, core.Variable) or not _reads_rows(x):
        return original(x, indices, axis)
    if isinstance(indices, tf.SparseTensor):
        if not isinstance(x._value, TableVariable):
            return original(x, indices, axis)
        # As Keras has it: what is missing is row 0.
        indices = tf.sparse.to_dense(indices)
    if isinstance(indices, tf.RaggedTensor):
        return indices.with_flat_values(_rows(x, indices.flat_values))
    return _rows(x, tf.convert_to_tensor(indices))


def _rows(variable, indices):
    if not isinstance(variable._value, TableVariable):
        # Tables have their own words for ids that are out of range.
        count = tf.cast(variable.shape[0], indices.dtype)
        indices = tf.where(indices < 0, indices + count, indices)
    return variable.sparse_read(indices)


def _reads_rows(variable):
    value = variable._value
    if isinstance(value, TableVariable):
        return not _has_other_value(variable)
    return not in_stateless_scope() and (on_ps(value) or row_reads.are_enabled(value))


def _has_other_value(variable):
    """Whether a scope of Keras's gives a variable another value than its own."""
    return in_stateless_scope() and get_stateless_scope().get_current_value(variable) is not None
