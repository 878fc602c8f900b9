"""Trains with a slow task: slow_task_job.py FOLDER MODE CAUSE.

Steps of worker-1 take far longer by CAUSE, `compute` or `data` (which workers read then); `chief`:
so do the batches that the chief reads. Other programs on the machine cost less.
"""

import os
import pathlib
import sys

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

import keras_psplus as psp
from keras_psplus.cluster.config import read_task_config

SECONDS, STEPS, SIZE = 0.3, 10, 256
SLOW = {"compute": "worker-1", "data": "worker-1", "chief": "chief-0"}


def slow(x):
    """1 where a step or the data run in the slow task, else 0."""
    # A file's content is that of the task; its name depends on the batch, so that nobody reads it
    # ahead.
    path = tf.where(tf.size(x) >= 0, "slow", "")
    return tf.strings.to_number(tf.io.read_file(path), tf.int64)


def late(x):
    """Passes rows on after some seconds, on whichever machine."""
    sleeping = tf.data.Dataset.range(1).apply(testing.sleep(int(SECONDS * 1e6) * slow(x)))
    slept = sleeping.reduce(tf.constant(0, tf.int64), lambda total, i: total + i)
    return x + tf.cast(slept, x.dtype)


class Late(keras.layers.Layer):
    """Computes for some seconds in training."""

    def call(self, x, training=False):
        return tf.stop_gradient(late(x)) if training else x


def main():
    folder, mode, cause = pathlib.Path(sys.argv[1]), *sys.argv[2:]
    name = read_task_config().name
    (folder / name).mkdir()
    os.chdir(folder / name)
    pathlib.Path("slow").write_text(str(int(SLOW[cause] == name)))
    strategy = psp.ParameterServerStrategy(mode=mode, startup_timeout=60)
    with strategy.scope():
        layers = [Late()] if cause == "compute" else []
        layers = [keras.Input((SIZE,)), *layers, *(keras.layers.Dense(SIZE) for _ in range(2))]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    rows = np.ones((STEPS * 8, SIZE), "float32")
    data = tf.data.Dataset.from_tensor_slices((rows, rows)).batch(8)
    if cause != "compute":
        data = data.map(lambda x, y: (late(x), y))
    if cause == "data":
        options = tf.data.Options()
        policy = tf.data.experimental.AutoShardPolicy.DATA
        options.experimental_distribute.auto_shard_policy = policy
        data = data.with_options(options)
    model.fit(data, epochs=2, validation_data=data.take(2), verbose=0)


if __name__ == "__main__":
    main()
