"""Tensors of single numbers."""

import numpy as np
import tensorflow as tf


def scalar_tensor(number: int | float, dtype: tf.DType) -> tf.Tensor:
    """A scalar tensor of a number that is another one in each step.

    `tf.constant` would do, but eagerly TensorFlow keeps the tensor of each Python number, and of
    each `np.float64`, until the process ends, should the same number be asked for again
    (`TFE_TensorHandleCache`): 0.8 kB for each step. It keeps none that is made of an array.

    Args:
        dtype: The tensor's type.
    """
    return tf.constant(np.array(number, dtype.as_numpy_dtype))
