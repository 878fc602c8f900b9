"""Rows in 16 bits: what a table stores, and how updates are rounded to it.

The update of a row is computed in float32. Rounded to nearest, one below half of the last bit would
be lost each time it comes; rounded at random, up or down in proportion to what is cut off, a row is
right on average. The random bits are functions of the key, the update and the column, so that they
are the same wherever a row lies, and when a job is resumed.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.arguments import shown
from keras_psplus.tables.keys import random_16_bits

BFLOAT16, FLOAT32 = "bfloat16", "float32"


def check_dtype(argument: str, value: Any) -> str:
    """The name of a type in which rows, or slots, are stored."""
    for name in (FLOAT32, BFLOAT16):
        if isinstance(value, (str, tf.DType, np.dtype)) and value == name:
            return name
    raise ValueError(
        f'`{argument}` must be "float32" or "bfloat16", in which tables store rows and slots. '
        f"Received: {argument}={shown(value)}"
    )


def at_random(values: tf.Tensor, keys: tf.Tensor, update: tf.Tensor, column: int) -> tf.Tensor:
    """float32 that are numbers of bfloat16, on average the given ones.

    Args:
        values: float32 matrix; numbers of bfloat16 stay as they are.
        keys: int64 vector, the keys of its rows.
        update: int64 scalar, the number of the update.
        column: 0 for rows, else the number of a slot.
    """
    noise = tf.cast(random_16_bits(keys, update, column, values.shape[1]), tf.uint32)
    # It carries to the upper half as often as the lower half says.
    upper = tf.constant(0xFFFF0000, tf.uint32)
    bits = tf.bitwise.bitwise_and(tf.bitcast(values, tf.uint32) + noise, upper)
    # Of what is no number, the sum may be one.
    return tf.where(tf.math.is_nan(values), values, tf.bitcast(bits, tf.float32))
