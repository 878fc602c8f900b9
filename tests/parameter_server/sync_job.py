"""A synchronous job whose result is known: a linear model, from zeros, by plain gradient descent.

sync_job.py STEPS FILE FOLDER CASES [overlap]

Half-way it waits until there is the file. Before, it trains the cases of `fit_cases.py`, for which
it leaves what they come to in the folder.
"""

import json
import pathlib
import sys
import time

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np

import keras_psplus as psp
from tests.multi_process import fit_cases

# So low that the last step still shows what was wrong with the first.
ROWS, RATE = 6, 0.001


def data(steps):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS * steps, 4)).astype("float32")
    return x, (x @ [[1.0], [-2.0], [0.5], [3.0]] + 0.25).astype("float32")


def by_hand(steps):
    """What one process comes to: the weights, and BatchNormalization's averages of two halves."""
    kernel, bias = np.zeros((4, 1)), np.zeros(1)
    mean, variance = np.zeros(4), np.ones(4)
    x, y = data(steps)
    for first in range(0, len(x), ROWS):
        rows = x[first : first + ROWS]
        error = rows @ kernel + bias - y[first : first + ROWS]
        kernel = kernel - RATE * 2 * rows.T @ error / ROWS
        bias = bias - RATE * 2 * error.mean(0)
        mean = 0.9 * mean + 0.1 * rows.mean(0)
        variance = 0.9 * variance + 0.1 * np.mean([h.var(0) for h in np.split(rows, 2)], 0)
    return {"weights": [*kernel.ravel(), *bias], "averages": [*mean, *variance]}


class Counting(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros")
        self.normal = keras.layers.BatchNormalization(momentum=0.9, center=False, scale=False)
        self.steps = self.add_weight(
            shape=(), dtype="int64", initializer="zeros", trainable=False, name="steps"
        )

    def call(self, x, training=None):
        self.normal(x, training=training)
        return self.dense(x)

    def train_step(self, data):
        self.steps.assign_add(1)
        return super().train_step(data)


class Progress(keras.callbacks.Callback):
    """Lets the test see how far the job is, and lets the job see how far the test is."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
        if batch % 20 == 0:
            print(f"batch {batch}.", flush=True)
        deadline = time.monotonic() + 60
        while batch == steps // 2 and not file.exists() and time.monotonic() < deadline:
            time.sleep(0.1)


def values(layer):
    return [float(value) for v in layer.weights for value in v.numpy().ravel()]


if __name__ == "__main__":
    steps, file = int(sys.argv[1]), pathlib.Path(sys.argv[2])
    strategy = psp.ParameterServerStrategy(
        startup_timeout=60,
        heartbeat_timeout=30,
        mode="sync",
        compression="topk:1.0",
        overlap_steps="overlap" in sys.argv,
    )
    fit_cases.run(
        [name for name in sys.argv[4].split(",") if name], strategy, "cluster", sys.argv[3]
    )
    with strategy.scope():
        model = Counting()
        model.compile(keras.optimizers.SGD(RATE), "mse")
    model.fit(*data(steps), batch_size=ROWS, shuffle=False, verbose=0, callbacks=[Progress()])
    result = {
        "iterations": int(model.optimizer.iterations.numpy()),
        "steps": int(model.steps.numpy()),
        "weights": values(model.dense),
        "averages": values(model.normal),
        "overlapped": strategy._context.attempts.overlapped,
    }
    print("result", json.dumps(result), flush=True)
