"""Trains with a dynamic table from a backup on, and may be killed in the middle.

dynamic_fault_job.py FOLDER CASE [--reference] [name=value ...]

`die=BATCH` has the chief killed after so many steps, once the backup has the files of `chain=COUNT`
saves; `pause=SECONDS` makes steps slow; `sync=0`,
`prefetch=1` are the strategy's. In the case `linear`, each update adds the same to a row whenever
it comes.
"""

import os
import pathlib
import signal
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.files.table_files import read_list, stems_of
from tests.hybrid import dynamic_job

EPOCHS = 3


class Disturb(keras.callbacks.Callback):
    """Kills this process after a number of steps, and makes them slow."""

    def __init__(self, folder, die=0, pause=0, chain=0):
        super().__init__()
        self.folder, self.chain = str(folder), int(chain)
        self.left, self.pause = int(die), float(pause)

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            # The last one is being written.
            while len(stems_of(read_list(self.folder))) < self.chain:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.pause)
        print(f"batch {int(self.model.optimizer.iterations.numpy())}.", flush=True)


def train_linear(x, **options):
    """A table whose rows grow by the number of their key's uses."""
    ids = keras.Input((5,), dtype="int64")
    table = psp.layers.DynamicEmbedding(
        dynamic_job.DIM, initializer="zeros", combiner="sum", name="t"
    )
    model = keras.Model(ids, table(ids))
    model.compile(keras.optimizers.SGD(1.0), loss=lambda y, rows: tf.reduce_mean(rows, axis=-1))
    whole = x[: len(x) // dynamic_job.BATCH * dynamic_job.BATCH]
    data = tf.data.Dataset.from_tensor_slices((whole, np.zeros([len(whole), 1])))
    model.fit(data.batch(dynamic_job.BATCH), verbose=0, **options)
    return model, table, {}


def main():
    folder, case = pathlib.Path(sys.argv[1]), sys.argv[2]
    options = dict(word.split("=") for word in sys.argv[3:] if "=" in word)
    is_reference = "--reference" in sys.argv
    strategy = psp.HybridStrategy(
        sync=options.get("sync") != "0", prefetch=options.get("prefetch") == "1"
    )
    x, y = dynamic_job.data()
    callbacks = []
    if not is_reference:
        callbacks.append(keras.callbacks.BackupAndRestore(folder / "backup", save_freq=3))
        die = options.get("die", 0) if strategy.is_chief else 0
        others = options.get("pause", 0), options.get("chain", 0)
        callbacks.append(Disturb(folder / "backup", die, *others))
    with strategy.scope():
        how = {"epochs": EPOCHS, "callbacks": callbacks}
        if case == "linear":
            model, table, results = train_linear(x, **how)
        else:
            ids = dynamic_job.as_ids(case, x)
            model, table, results = dynamic_job.train(case, ids, y, **how)
        results |= dynamic_job.contents(model, table)
    who = "reference" if is_reference else strategy.task.name
    np.savez(folder / f"{case}-{who}.npz", **results)
    print(f"done: {len(results['table_keys'])} keys", flush=True)


if __name__ == "__main__":
    main()
