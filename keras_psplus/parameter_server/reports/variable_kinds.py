"""Kinds of variables: on parameter servers, or sent with each closure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import tensorflow as tf

from keras_psplus.core.base.metric_state import accumulates
from keras_psplus.parameter_server.tracing.worker_function import ClosureVariable

if TYPE_CHECKING:
    import keras

# Elements. A closure variable crosses the chief's network with every share of a step.
_LARGEST_STATE = 1 << 16


def kind_of(variable: keras.Variable, is_sync: bool) -> str | None:
    """Kind of a closure variable, or None for a variable that is none."""
    if variable._name == "seed_generator_state":
        return "seed"
    if accumulates(variable):
        return "total"
    return "state" if is_sync and _is_state(variable) else None


def _is_state(variable: keras.Variable) -> bool:
    """Whether a variable is a layer's own, which steps change otherwise than by gradients."""
    dtype = tf.as_dtype(variable.dtype)
    return (
        variable._is_of_layer
        and not variable.trainable
        and (dtype.is_floating or dtype.is_integer)
        and math.prod(variable.shape) <= _LARGEST_STATE
    )


def on_ps(variable: tf.Variable) -> bool:
    """Whether a variable of TensorFlow's lies on a parameter server."""
    return "/job:ps/" in (getattr(variable, "device", None) or "")


def is_closure_variable(variable: tf.Variable) -> bool:
    """Whether a variable of TensorFlow's goes with each closure, and is kept by the chief."""
    return isinstance(variable, ClosureVariable)
