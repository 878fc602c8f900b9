"""Lookups of rows, which read each distinct row of a batch once."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_psplus.tf_internals import record, resource_variable_ops


def lookup(
    variable: tf.Variable,
    shape: tf.TensorShape,
    indices: Any,
    read_rows: Callable[[tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Gathers rows of a variable.

    Args:
        variable: The variable, as the tape knows it.
        shape: Shape of its whole value.
        indices: Integer tensor of row numbers.
        read_rows: Function that brings the rows of a vector of distinct row numbers.

    Returns:
        The rows, a tensor of shape `indices.shape + shape[1:]`.
    """
    resource_variable_ops.variable_accessed(variable)
    indices = tf.convert_to_tensor(indices)
    row_shape = shape[1:]
    with record.stop_recording():
        unique, positions = tf.unique(tf.reshape(indices, [-1]))
        rows = tf.gather(read_rows(unique), positions)
        rows = tf.reshape(rows, tf.concat([tf.shape(indices), row_shape.as_list()], 0))
        rows.set_shape(indices.shape.concatenate(row_shape))

    def backward(gradient: tf.Tensor) -> list[tf.IndexedSlices]:
        # Repeated rows stay apart, as Keras's optimizers get them in one process; see
        # `duplicate_rows`, which may sum them before they are sent.
        values = tf.reshape(gradient, [-1, *row_shape.as_list()])
        whole = tf.constant(shape.as_list(), tf.int64)
        return [tf.IndexedSlices(values, tf.reshape(indices, [-1]), whole)]

    record.record_operation(
        "ResourceGather",
        [rows],
        [variable.handle],
        backward_function=backward,
        forward_function=None,
    )
    return rows
