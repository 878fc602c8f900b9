"""Training with dynamic tables, synchronous and asynchronous.

dynamic_job.py FOLDER CASES STEPS

First the cases of the job of `HybridStrategy`. Then asynchronous steps with a loss that is linear
in the rows, each of which is the sum of its gradients, however steps overtake others. Half-way
they wait until there is FOLDER/file.
"""

import contextlib
import functools
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
from tests.hybrid import dynamic_job

KEYS, ROWS, RATE = 50, 8, 0.5


def data(steps):
    rng = np.random.default_rng(5)
    return rng.integers(0, KEYS, (ROWS * steps, 3)) - KEYS // 2, rng.integers(1, 9, ROWS * steps)


def by_hand(steps):
    """Rows and the number of updates of each key, in their order."""
    rows, counts = np.zeros(KEYS), np.zeros(KEYS, int)
    ids, targets = data(steps)
    for first in range(0, len(ids), ROWS):
        part = ids[first : first + ROWS] + KEYS // 2
        np.add.at(rows, part, -RATE / ROWS * targets[first : first + ROWS, np.newaxis])
        counts[np.unique(part)] += 1
    return rows[counts > 0], counts[counts > 0]


class BreakOff(keras.callbacks.Callback):
    """Ends training in the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.is_second = epoch == 1

    def on_train_batch_end(self, batch, logs=None):
        if self.is_second and batch == 3:
            raise InterruptedError


def check_backup(folder, model, table, x, y):
    """Breaks training off, which goes on in another model to where it came without.

    Before that, the model is exported; meanwhile, its table is published.
    """
    model.export(folder / "exported", verbose=False)
    expected = dynamic_job.contents(model, table)
    for last in [BreakOff()], []:
        backup = keras.callbacks.BackupAndRestore(folder / "backup", save_freq=2)
        with contextlib.suppress(InterruptedError):
            ids = dynamic_job.as_ids("counted", x)
            publish = psp.callbacks.PublishTables(folder / "published", every=2)
            callbacks = [backup, publish, *last]
            model, table, _ = dynamic_job.train("counted", ids, y, callbacks=callbacks)
    for what, value in dynamic_job.contents(model, table).items():
        np.testing.assert_allclose(value, expected[what], rtol=1e-4, atol=2e-5, err_msg=what)
    reader = psp.serving.TableReader(folder / "published", poll=None)
    np.testing.assert_array_equal(reader.lookup(table.keys), table.table.numpy())
    assert len(reader) == len(table.keys)


class Progress(keras.callbacks.Callback):
    """Lets the test see how far the job is, and lets the job see how far the test is."""

    def on_train_batch_end(self, batch, logs=None):
        # The last one of two.
        if batch % 20 == 1:
            print(f"batch {batch}.", flush=True)
        deadline = time.monotonic() + 60
        while batch == steps - 19 and not file.exists() and time.monotonic() < deadline:
            time.sleep(0.1)


def train_linear(strategy):
    """What asynchronous steps come to."""
    with strategy.scope():
        table = psp.layers.DynamicEmbedding(1, initializer="zeros", combiner="sum")
        ids = keras.Input((3,), dtype="int64")
        model = keras.Model(ids, table(ids))
        model.compile(
            keras.optimizers.SGD(RATE),
            lambda target, sums: keras.ops.cast(target, "float32") * sums,
            steps_per_execution=2,
        )
    model.fit(*data(steps), batch_size=ROWS, shuffle=False, verbose=0, callbacks=[Progress()])
    return {
        "rows": table.table.numpy()[:, 0].tolist(),
        "counts": table.counts()[0].tolist(),
        "keys": table.keys.tolist(),
        "predicted": model.predict(data(1)[0], verbose=0)[:, 0].tolist(),
    }


if __name__ == "__main__":
    folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[3])
    file, names = folder / "file", [name for name in sys.argv[2].split(",") if name]
    synchronous = psp.ParameterServerStrategy(startup_timeout=60, mode="sync")
    dynamic_job.run(
        *(synchronous, folder, names, "chief-0"), functools.partial(check_backup, folder)
    )
    # The first has made itself known to the other tasks.
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
    result = train_linear(psp.ParameterServerStrategy(resolver, heartbeat_timeout=30))
    print("result", json.dumps(result), flush=True)
