"""Training whose workers a test kills and starts again.

kill_job.py FOLDER PHASE [PHASE ...]

Each phase trains and says after each batch how far it is. Half-way it waits for the file
`PHASE killed`, before the last quarter for `PHASE back`. Where a result is known, the gradient is
the same whatever the weights are, or steps are synchronous.
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
from keras_psplus import compression, updates
from tests.parameter_server.options import options
from tests.parameter_server.worker_data_cases import Seen

STEPS, ROWS = 60, 6
# So low that the last step still shows what was wrong with the first.
RATE = 0.001
KEYS, NUMBERS, WIDTH = 50, 161, 100


class Progress(keras.callbacks.Callback):
    """Lets the test see how far a phase is, and has it wait for the test."""

    def __init__(self, phase, batches=STEPS):
        super().__init__()
        self.phase, self.gates = phase, {batches // 2: "killed", 3 * batches // 4: "back"}

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
        print(f"{self.phase} batch {batch}.", flush=True)
        # With two steps in a call, the batch is the last of them.
        for gate in [gate for gate in self.gates if gate <= batch]:
            wait_for(f"{self.phase} {self.gates.pop(gate)}")


def wait_for(name):
    deadline = time.monotonic() + 120
    while not (folder / name).exists() and time.monotonic() < deadline:
        time.sleep(0.05)


class Counting(keras.Model):
    """Counts its steps beside what it trains."""

    def __init__(self, *layers):
        super().__init__()
        self.parts = layers
        counter = dict(shape=(), dtype="int64", initializer="zeros", trainable=False)
        self.steps = self.add_weight(name="steps", **counter)

    def train_step(self, data):
        self.steps.assign_add(1)
        return super().train_step(data)


# Synchronous steps.


def problem():
    x = np.random.default_rng(3).normal(size=(ROWS * STEPS, 4)).astype("float32")
    return x, (x @ [[1.0], [-2.0], [0.5], [3.0]] + 0.25).astype("float32")


def by_hand():
    """What one process comes to: the weights, and BatchNormalization's averages of two halves."""
    kernel, bias, mean, variance = np.zeros((4, 1)), np.zeros(1), np.zeros(4), np.ones(4)
    x, y = problem()
    for first in range(0, len(x), ROWS):
        rows = x[first : first + ROWS]
        error = rows @ kernel + bias - y[first : first + ROWS]
        kernel = kernel - RATE * 2 * rows.T @ error / ROWS
        bias = bias - RATE * 2 * error.mean(0)
        mean = 0.9 * mean + 0.1 * rows.mean(0)
        variance = 0.9 * variance + 0.1 * np.mean([h.var(0) for h in np.split(rows, 2)], 0)
    return {"weights": [*kernel.ravel(), *bias], "averages": [*mean, *variance]}


class Linear(Counting):
    def call(self, x, training=None):
        dense, normal = self.parts
        normal(x, training=training)
        return dense(x)


def synchronous(phase, overlap):
    with options(strategy, compression="topk:1.0", overlap=overlap):
        with strategy.scope():
            model = Linear(
                keras.layers.Dense(1, kernel_initializer="zeros"),
                keras.layers.BatchNormalization(momentum=0.9, center=False, scale=False),
            )
            model.compile(keras.optimizers.SGD(RATE), "mse")
        fit = dict(batch_size=ROWS, shuffle=False, verbose=0, callbacks=[Progress(phase)])
        model.fit(*problem(), **fit)
        overlapped = strategy._context.attempts.overlapped
    values = [
        [float(value) for v in layer.weights for value in v.numpy().ravel()]
        for layer in model.parts
    ]
    return {
        "iterations": int(model.optimizer.iterations.numpy()),
        "steps": int(model.steps.numpy()),
        "weights": values[0],
        "averages": values[1],
        "overlapped": overlapped,
    }


# Asynchronous steps.


def keyed():
    """Ids of a table, of which some are negative, and factors of their gradients."""
    rng = np.random.default_rng(5)
    return rng.integers(0, KEYS, (ROWS * STEPS, 3)) - KEYS // 2, rng.integers(1, 9, ROWS * STEPS)


def table_by_hand():
    """Rows and the number of updates of each key that comes, in their order."""
    rows, counts = np.zeros(KEYS), np.zeros(KEYS, int)
    ids, factors = keyed()
    for first in range(0, len(ids), ROWS):
        part = ids[first : first + ROWS] + KEYS // 2
        np.add.at(rows, part, -0.5 / ROWS * factors[first : first + ROWS, np.newaxis])
        counts[np.unique(part)] += 1
    return rows[counts > 0], counts[counts > 0]


class Tabled(Counting):
    def call(self, ids, training=None):
        dense, table = self.parts
        return dense(keras.ops.cast(ids, "float32")) + table(ids, training=training)


def with_table(phase, overlap=False):
    """Steps of which a dense layer's gradients are compressed, and a table's rows are exact."""
    int8 = compression.ByVariable({"*dense*": compression.Int8()}, min_size=1, min_rank=0)
    with options(strategy, compression=int8, overlap=overlap):
        with strategy.scope():
            table = psp.layers.DynamicEmbedding(1, initializer="zeros", combiner="sum")
            model = Tabled(keras.layers.Dense(1), table)
            model.compile(
                keras.optimizers.SGD(0.5),
                lambda factor, sums: keras.ops.cast(factor, "float32") * sums,
                steps_per_execution=1 if overlap else 2,
            )
        fit = dict(batch_size=ROWS, shuffle=False, verbose=0)
        model.fit(*keyed(), callbacks=[Progress(phase)], **fit)
        model.evaluate(*keyed(), batch_size=ROWS, verbose=0)
    optimizers.append(model.optimizer)
    return {
        "states": workers_with_state(),
        "steps": int(model.steps.numpy()),
        "iterations": int(model.optimizer.iterations.numpy()),
        "evaluated": int(model.metrics[0].count.numpy()),
        "rows": table.table.numpy()[:, 0].tolist(),
        "counts": table.counts()[0].tolist(),
        "keys": table.keys.tolist(),
    }


def workers_with_state():
    """The workers that have something of what they have left out of the last table's model."""
    return sorted({name.split("/")[0] for name in strategy.state_dict(optimizers[-1])})


def shares():
    """Each worker reads its share of the data."""
    policy = tf.data.Options()
    policy.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    numbers = tf.data.Dataset.range(1, NUMBERS + 1).shuffle(30).batch(4)
    numbers = numbers.map(lambda n: tf.cast(n, tf.float32)[:, None])
    numbers = numbers.map(lambda n: (n / 1000, n)).with_options(policy)
    with options(strategy), strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        metrics = [Seen(power) for power in range(3)]
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=metrics)
        history = model.fit(
            numbers, epochs=2, verbose=0, callbacks=[Progress("shares", NUMBERS // 4)]
        )
    # Of the phase before; meanwhile, a worker was lost.
    return {"states": workers_with_state(), **history.history}


def sums():
    """Each worker keeps what it has summed: nothing is sent."""
    # Both have to be there.
    wait_for("sums begins")
    with options(strategy, updates=updates.Accumulate(1000)):
        with strategy.scope():
            zeros = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
            model = keras.Sequential([keras.Input((WIDTH,)), zeros])
            model.compile(keras.optimizers.SGD(0.5), lambda y, output: output)
        ones = np.ones((2 * STEPS, WIDTH), "float32")
        model.fit(ones, ones[:, :1], batch_size=2, verbose=0, callbacks=[Progress("sums")])
        found = {"pending": strategy._context.updating.pending}
        before = model.get_weights()[0]
        strategy.finish_updates(model.optimizer)
        found["iterations"] = int(model.optimizer.iterations.numpy())
        return found | {"before": before[0].tolist(), "after": model.get_weights()[0][0].tolist()}


PHASES = {
    "apart": lambda: synchronous("apart", overlap=False),
    "together": lambda: synchronous("together", overlap=True),
    "steps": lambda: with_table("steps"),
    "overlapping": lambda: with_table("overlapping", overlap=True),
    "overlapping again": lambda: with_table("overlapping again", overlap=True),
    "shares": shares,
    "sums": sums,
    "last": lambda: with_table("last"),
}

if __name__ == "__main__":
    folder, names, optimizers = pathlib.Path(sys.argv[1]), sys.argv[2:], []
    strategy = psp.ParameterServerStrategy(
        startup_timeout=60,
        heartbeat_timeout=5,
        mode="sync" if "apart" in names else "async",
        overlap_steps=True,
    )
    for name in names:
        print(f"result of {name}:", json.dumps(PHASES[name]()), flush=True)
