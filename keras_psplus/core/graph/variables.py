"""Variables that steps count in, reads that tapes do not see by themselves, and shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import record, resource_variable_ops


def made_outside(value: Callable[[], Any], device: str = "CPU:0") -> tf.Variable:
    """Variable for what a step counts, made outside of the graph that is being traced."""
    with ops.init_scope(), ops.device(device):
        return resource_variable_ops.ResourceVariable(value(), trainable=False)


def record_read(variable: tf.Variable, value: tf.Tensor) -> None:
    """Tells tapes that a value, made unseen, is a variable's, and so its gradient."""
    record.record_operation(
        "ReadVariableOp",
        [value],
        [variable.handle],
        backward_function=lambda gradient: [gradient],
        forward_function=lambda tangent: [tangent],
    )


def gradient_shape(variable: Any) -> Any:
    """Shape of a variable's gradient: that of this worker's part if layers compute with parts."""
    return getattr(getattr(variable, "_value", variable), "local_shape", variable.shape)


def shape_to_be(variable: keras.Variable, value: Any) -> tuple[int, ...] | None:
    """Shape of a Keras variable that is being made, also from a number.

    Args:
        value: Its initial value, or a function that returns it.
    """
    shape: tuple[int, ...] | None = variable._shape
    if shape is not None or callable(value):
        return shape
    return tuple(value.shape if hasattr(value, "shape") else np.shape(value))
