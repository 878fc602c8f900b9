"""A job of parameter servers that counts, and trains until it may end.

elastic_job.py FOLDER [sync] [int8] [overlap] [workers_read] [backup] [gate]

Each epoch's line has the rows that metrics have seen, in training and in validation, and the steps
by worker. Training ends with the epoch in which FOLDER/end is there. The last line has how far
weights are off those of one process, if steps are synchronous. With `gate`, the chief says
`at the gate` before TensorFlow connects to other workers, and waits while FOLDER/gate is there.
"""

import json
import pathlib
import sys
import time

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.parameter_server import scheduler
from keras_psplus.tf_internals import context

STEPS, ROWS, RATE = 60, 4, 0.001


class Counting(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.dense.build((None, 4))
        self.steps = self.add_weight(
            shape=(), dtype="int64", initializer="zeros", trainable=False, name="steps"
        )
        self.rows = keras.metrics.Sum(name="rows")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        self.steps.assign_add(1)
        return super().train_step(data)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.rows.update_state(tf.ones_like(y))
        return super().compute_metrics(x, y, y_pred, sample_weight)


class Progress(keras.callbacks.Callback):
    """Says how far the job is, and ends it."""

    def __init__(self, folder):
        super().__init__()
        self._end, self.epochs = folder / "end", 0

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.01)

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1
        rows = [int(logs["rows"]), int(logs["val_rows"])]
        print("epoch", json.dumps([rows, self.model.distribute_strategy.steps_by_worker]))
        self.model.stop_training = self._end.exists()


def put_a_gate(folder):
    """Has TensorFlow wait before it connects, when the chief has looked for all workers."""
    tensorflow_context, gate = context.context(), folder / "gate"
    update = tensorflow_context.update_server_def

    def wait_and_update(definition):
        if gate.exists():
            print("at the gate")
        while gate.exists():
            time.sleep(0.05)
        update(definition)

    tensorflow_context.update_server_def = wait_and_update
    scheduler._PATIENCE_SECONDS = 1.0


def train_alone(weights, data, epochs):
    """Weights that one process has in the end."""
    with psp.single_process():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.set_weights(weights)
        model.compile(keras.optimizers.SGD(RATE), "mse")
        model.fit(data, epochs=epochs, verbose=0)
    return model.get_weights()


def main():
    folder, options = pathlib.Path(sys.argv[1]), sys.argv[2:]
    strategy = psp.ParameterServerStrategy(
        startup_timeout=120,
        mode="sync" if "sync" in options else "async",
        compression="int8" if "int8" in options else None,
        overlap_steps="overlap" in options,
    )
    if "gate" in options:
        put_a_gate(folder)
    with strategy.scope():
        model = Counting()
        model.compile(keras.optimizers.SGD(RATE), "mse")
    x = np.ones((STEPS * ROWS, 4), "float32")
    x[:, 1:] = np.random.default_rng(1).normal(size=(STEPS * ROWS, 3))
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(ROWS)
    if "workers_read" in options:
        sharding = tf.data.Options()
        sharding.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.DATA
        )
        data = data.with_options(sharding)
    before = model.dense.get_weights()
    progress = Progress(folder)
    callbacks = [progress]
    if "backup" in options:
        callbacks.append(keras.callbacks.BackupAndRestore(folder / "backup", save_freq=25))
    model.fit(data, validation_data=data, epochs=10_000, verbose=0, callbacks=callbacks)
    steps, iterations = int(model.steps.numpy()), int(model.optimizer.iterations.numpy())
    off = 0.0
    if "sync" in options:
        pairs = zip(model.dense.get_weights(), train_alone(before, data, progress.epochs))
        off = max(float(np.abs(one - other).max()) for one, other in pairs)
    print("end", json.dumps([progress.epochs, steps, iterations, off]))


if __name__ == "__main__":
    main()
