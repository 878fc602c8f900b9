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

import keras_psplus as psp

L, O = keras.layers, keras.optimizers  # noqa: E741
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


if __name__ == "__main__":
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    if "updates" in options:
        options["updates"] = psp.updates.Accumulate(STEPS, flush=True)
    cases = {f"accumulated/{n}": lambda n=n: accumulated(n) for n in ACCUMULATED}
    shares_job.main(pathlib.Path(sys.argv[1]), sys.argv[2].split(","), cases, **options)
