"""Trains with shares and other arguments of the strategy, or in one process.

options_job.py FOLDER CASE,CASE...

The strategy's arguments are the JSON in OPTIONS. What each case leaves is written to
`<folder>/<case>.<task>.npz`.
"""

import json
import os
import pathlib
import sys

from tests.sharding import shares_job

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp

L, O = keras.layers, keras.optimizers  # noqa: E741
DIGITS = pathlib.Path(__file__).parents[2] / "examples" / "digits.npz"
ACCUMULATED = ["adamw", "average", "loss_scale", "muon", "embedding/adagrad"]
STEPS, BATCH = 3, 6


def accumulated(name):
    """Updates by several batches on a cluster, and by one of all of their rows in one process."""
    kind, _, optimizer = name.rpartition("/")
    optimizer = shares_job.OPTIMIZERS[optimizer]()
    if kind:
        model, x = shares_job.embedding(optimizer)
    else:
        keras.utils.set_random_seed(3)
        layers = [L.Dense(5, activation="tanh"), L.Dense(3)]
        model = shares_job.compiled(keras.Sequential([keras.Input((7,)), *layers]), optimizer)
        x = np.random.RandomState(1).randn(50, 7).astype("float32")
    model.optimizer.build(model.trainable_variables)
    batch_size = BATCH if os.environ.get("TF_CONFIG") else STEPS * BATCH
    return shares_job.left(model, shares_job.fit(model, x, batch_size=batch_size))


def wire_of(strategy):
    return strategy.communication.wire_bytes if strategy else 0


def digits():
    """Accuracy on digits that training has not seen, what each worker has, and bytes of a step."""
    with np.load(DIGITS) as file:
        x, y = file["x"].astype("float32") / 16, file["y"].astype("int32")
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    keras.utils.set_random_seed(1)
    layers = [L.Dense(96, activation="relu"), L.Dense(10)]
    model = shares_job.compiled(keras.Sequential([keras.Input((64,)), *layers]), O.Adam(5e-3))
    strategy = tf.distribute.get_strategy() if os.environ.get("TF_CONFIG") else None
    before = wire_of(strategy)
    model.fit(x[597:], y[597:], batch_size=48, epochs=10, shuffle=False, verbose=0)
    wire = (wire_of(strategy) - before) / 250
    weights = {f"weights/{i}": value for i, value in enumerate(model.get_weights())}
    accuracy = model.evaluate(x[:597], y[:597], batch_size=199, verbose=0)[1]
    return weights | {"accuracy": np.asarray(accuracy), "wire": np.asarray(wire)}


if __name__ == "__main__":
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    if "updates" in options:
        options["updates"] = psp.updates.Accumulate(STEPS, flush=True)
    cases = {f"accumulated/{n}": lambda n=n: accumulated(n) for n in ACCUMULATED}
    cases["digits"] = digits
    shares_job.main(pathlib.Path(sys.argv[1]), sys.argv[2].split(","), cases, **options)
