"""Trains with one slow worker: slow_task_job.py STRATEGY CAUSE, where CAUSE is data, compute, none.

Steps of worker-1 take half a second more by it, far more than other programs on the machine cost.
Of a pipeline, stage 1 computes so much more, or the chief reads so much slower.
"""

import sys
import time

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp

SECONDS, STEPS, SIZE = 0.5, 6, 256


class Late(keras.layers.Layer):
    """Passes its inputs on after some seconds."""

    def __init__(self, seconds):
        super().__init__()
        self._seconds = seconds

    def call(self, x):
        return tf.stop_gradient(late(x, self._seconds)) if self._seconds else x


class Busy(keras.layers.Layer):
    """Passes its inputs on after as many products of matrices, on whichever machine."""

    def __init__(self, products, name):
        super().__init__(name=name)
        self._products = products

    def call(self, x):
        square = tf.fill([512, 512], tf.reduce_mean(tf.stop_gradient(x)))
        _, found = tf.while_loop(
            lambda i, _: i < self._products,
            lambda i, a: (i + 1, tf.tanh(a @ a / 512)),
            (0, square),
            parallel_iterations=1,
        )
        return x + 1e-9 * tf.stop_gradient(tf.reduce_mean(found))


def late(x, seconds):
    def wait(x):
        time.sleep(seconds)
        return x

    return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape)


def main():
    kind, cause = sys.argv[1:3]
    stages = [["first"], ["busy", "last"]]
    is_pipeline = kind == "PipelineStrategy"
    strategy = getattr(psp, kind)(**({"microbatches": 2, "stages": stages} if is_pipeline else {}))
    seconds = {"none": 0.0, "data": 0.0, "compute": 0.0}
    if strategy.task.name == "worker-1" or is_pipeline:
        seconds[cause] = SECONDS
    with strategy.scope():
        layers = [Late(seconds["compute"]), keras.layers.Dense(SIZE)]
        if is_pipeline:
            layers = [keras.layers.Dense(SIZE, name=name) for name in ("first", "last")]
            layers.insert(1, Busy(80 if cause == "compute" else 0, "busy"))
        model = keras.Sequential([keras.Input((SIZE,)), *layers])
        model.compile("sgd", "mse")
    rows = np.ones((STEPS * 8, SIZE), "float32")
    data = tf.data.Dataset.from_tensor_slices((rows, rows)).batch(8)
    data = data.map(lambda x, y: (late(x, seconds["data"]), y))
    model.fit(data, epochs=2, validation_data=data.take(2), verbose=0)


if __name__ == "__main__":
    main()
