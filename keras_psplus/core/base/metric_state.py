"""States of metrics, which are totals over replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

if TYPE_CHECKING:
    import keras


def accumulates(variable: keras.Variable) -> bool:
    """Whether a Keras variable is a metric's state, a total over replicas."""
    return bool(variable.synchronization == "on_read" and variable.aggregation == "sum")


def added(after: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    """The change that a step made to a total; zero if it stays infinite."""
    # inf - inf would be NaN.
    return tf.where(tf.equal(after, before), tf.zeros_like(after), after - before)
