"""Training in one process that publishes its model at each step, and dies within a version.

publishing_job.py FOLDER

After the last step it waits until another process has seen that step's version.
"""

import os
import pathlib
import signal
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import keras_psplus as psp

STEPS, BATCH = 10, 16
IDS = np.random.default_rng(1).integers(-(2**62), 2**62, 60)


def build(**table):
    """Model with two tables for any id, one of a fixed size, and other weights."""
    ids = keras.Input((3,), dtype="int64", name="ids")
    parts = [
        psp.layers.DynamicEmbedding(4, combiner="sum", name=name, **table)(ids)
        for name in ("published_a", "published_b")
    ]
    fixed = keras.layers.Embedding(7, 2, name="published_fixed")(ids % 7)
    parts.append(keras.layers.Lambda(lambda rows: keras.ops.sum(rows, 1), (2,))(fixed))
    model = keras.Model(ids, keras.layers.Dense(1, name="out")(keras.layers.Concatenate()(parts)))
    model.compile(keras.optimizers.Adagrad(0.3), "mse")
    return model


def batches(steps=STEPS):
    """Ids of which some are new in each step."""
    random = np.random.default_rng(0)
    first = np.arange(steps * BATCH)[:, np.newaxis] // BATCH * 6
    return IDS[(first + random.integers(0, 18, (steps * BATCH, 3))) % 60], np.ones([steps * BATCH])


def weights_of(model):
    """All that the model computes with, by names."""
    found = {"fixed": model.get_layer("published_fixed").embeddings.numpy()}
    for name in "a", "b":
        layer = model.get_layer(f"published_{name}")
        found |= {f"keys_{name}": layer.keys, f"rows_{name}": layer.table.numpy()}
    kernel, bias = model.get_layer("out").variables
    return found | {"kernel": kernel.numpy(), "bias": bias.numpy()}


def outputs(weights, ids):
    """Outputs of the model with these weights."""
    parts = []
    for name in "a", "b":
        rows = dict(zip(weights[f"keys_{name}"].tolist(), weights[f"rows_{name}"]))
        parts.append([sum(rows.get(one, np.zeros(4)) for one in line) for line in ids.tolist()])
    parts.append(weights["fixed"][ids % 7].sum(1))
    return np.concatenate(parts, 1) @ weights["kernel"] + weights["bias"]


def main():
    folder = pathlib.Path(sys.argv[1])
    model = build(expire=psp.tables.Unused(steps=3))

    def note(batch, logs):
        np.savez(folder / f"{batch + 1}.npz", **weights_of(model))
        time.sleep(0.2)

    def die_in_the_middle(batch, logs):
        while batch == STEPS - 1 and not (folder / "seen").exists():
            time.sleep(0.02)
        if batch == STEPS - 1:
            write = np.save
            # The last file of the second table.
            np.save = lambda path, array: (
                os.kill(os.getpid(), signal.SIGKILL) if "1-gone" in path else write(path, array)
            )

    publish = psp.serving.PublishTables(folder / "published", every=1, model=True)
    of_batch = keras.callbacks.LambdaCallback
    callbacks = [of_batch(on_train_batch_end=note), publish]
    callbacks.append(of_batch(on_train_batch_end=die_in_the_middle))
    x, y = batches(STEPS + 1)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)


if __name__ == "__main__":
    main()
