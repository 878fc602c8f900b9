"""Broadcast of values that the chief alone has read from a disk."""

from collections.abc import Iterable

import keras
import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import Variable


def from_chief(
    strategy: tf.distribute.Strategy, variables: Iterable[keras.Variable | tf.Variable]
) -> None:
    """Gives all workers the chief's values of variables."""
    if strategy.extended.control is None:
        return
    with tf.init_scope():
        values = [v._value if isinstance(v, Variable) else v for v in variables]
        strategy.extended.broadcast(values)
