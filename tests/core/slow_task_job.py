"""Trains with one slow worker: slow_task_job.py STRATEGY CAUSE, where CAUSE is data, compute, none.

Steps of worker-1 take 30 ms more by it. Parameter servers' workers run no Python: the data of
worker-1 are computed there, and `--chaos` makes it slow.
"""

import sys
import time

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp

SECONDS, STEPS, SIZE = 0.03, 12, 256


class Late(keras.layers.Layer):
    """Passes its inputs on after some seconds."""

    def __init__(self, seconds):
        super().__init__()
        self._seconds = seconds

    def call(self, x):
        return tf.stop_gradient(late(x, self._seconds)) if self._seconds else x


def late(x, seconds):
    def wait(x):
        time.sleep(seconds)
        return x

    return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape)


def effort(x):
    """Passes data on after some computation."""
    step = tf.random.normal([500, 500])
    for _ in range(30):
        step = tf.tanh(step @ step)
    return x + 0.0 * tf.reduce_sum(step)


def main():
    kind, cause = sys.argv[1:3]
    strategy = getattr(psp, kind)()
    is_slow, serves = strategy.task.name == "worker-1", kind == "ParameterServerStrategy"
    seconds = {"none": 0.0, "data": 0.0, "compute": 0.0}
    if is_slow:
        seconds[cause] = SECONDS
    with strategy.scope():
        layers = [Late(seconds["compute"]), keras.layers.Dense(SIZE)]
        model = keras.Sequential([keras.Input((SIZE,)), *layers])
        model.compile("sgd", "mse")
    rows = np.ones((STEPS * 8, SIZE), "float32")
    data = tf.data.Dataset.from_tensor_slices((rows, rows)).batch(8)
    if not serves:
        data = data.map(lambda x, y: (late(x, seconds["data"]), y))
        model.fit(data, epochs=2, validation_data=data.take(2), verbose=0)
        return

    def of_worker(context):
        if cause == "data" and context.input_pipeline_id == 1:
            return data.map(lambda x, y: (effort(x), y))
        return data

    data_of_workers = strategy.distribute_datasets_from_function(of_worker)
    model.fit(data_of_workers, epochs=3, verbose=0)


if __name__ == "__main__":
    main()
