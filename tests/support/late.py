"""Tensors and rates that are there later, for workers that are late."""

import time

import keras
import tensorflow as tf


def after(seconds, tensor):
    """A tensor that is there after some seconds."""
    if not seconds:
        return tensor
    wait = tf.py_function(lambda _: time.sleep(seconds), [tensor], [])
    with tf.control_dependencies([wait]):
        return tf.identity(tensor)


class LateRate(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that is there after some seconds, so that a worker then changes its weights."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def __call__(self, step):
        return after(self.seconds, tf.constant(0.05))

    def get_config(self):
        return {"seconds": self.seconds}
