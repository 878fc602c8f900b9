"""Reads of variables that the tape does not see by itself."""

from __future__ import annotations

import tensorflow as tf

from keras_psplus.tf_internals import record


def record_read(variable: tf.Variable, value: tf.Tensor) -> None:
    """Tells tapes that a value, made unseen, is a variable's, and so its gradient."""
    record.record_operation(
        "ReadVariableOp",
        [value],
        [variable.handle],
        backward_function=lambda gradient: [gradient],
        forward_function=lambda tangent: [tangent],
    )
