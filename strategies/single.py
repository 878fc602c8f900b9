"""One process on one device, as plain Keras trains."""

import tensorflow as tf


def strategy():
    """TensorFlow's default strategy, whatever `TF_CONFIG` says."""
    return tf.distribute.get_strategy()
