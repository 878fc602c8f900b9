"""Trains a table of known values for a number of steps, for tests that disturb it.

fault_job.py STEPS FOLDER [name=value ...]

Each step adds to the rows of its ids what plain gradient descent adds; the chief prints steps, and
at the end whether the table is what it has to be. With `backup=1` it resumes from the folder;
`bad_id=1` has worker 1 ask for a row that is not there; `pause=SECONDS` makes steps slow.
"""

import os
import pathlib
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp

ROWS, DIM, BATCH = 40, 4, 8


def main():
    steps, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
    options = dict(word.split("=") for word in sys.argv[3:])
    pause = float(options.get("pause", 0))
    strategy = psp.HybridStrategy(
        placement={"*/embeddings": "parameter_server"},
        sync=options.get("sync", "1") == "1",
        prefetch=options.get("prefetch") == "1",
        table_timeout=float(options.get("timeout", 60)),
        job_token=options.get("token"),
        row_compression=options.get("push"),
        pull_compression=options.get("pull"),
    )
    ids = np.arange(BATCH * steps).astype("int32").reshape(-1, 1) % ROWS
    if options.get("bad_id"):
        ids[7 * BATCH + BATCH - 1] = ROWS + 3

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((1,), dtype="int32"),
                keras.layers.Embedding(ROWS, DIM, embeddings_initializer="zeros"),
                keras.layers.Lambda(lambda rows: rows[:, 0]),
            ],
        )
        # The gradient of the mean over a batch of rows that are all different, by plain descent:
        # each row goes down by 1 / BATCH / DIM at each step that has it.
        model.compile(
            optimizer=keras.optimizers.SGD(1.0, momentum=float(options.get("momentum", 0))),
            loss=lambda y, rows: tf.reduce_mean(rows, axis=-1),
        )

    class Tell(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(pause)
            print(f"batch {int(self.model.optimizer.iterations.numpy())}.", flush=True)

    callbacks = [Tell()]
    epochs, per_epoch = 1, steps
    if options.get("backup"):
        per_epoch = 10
        epochs = steps // per_epoch
        callbacks.append(keras.callbacks.BackupAndRestore(folder / "backup"))
    data = tf.data.Dataset.from_tensor_slices((ids, np.zeros((len(ids), 1), "float32")))
    data = data.batch(BATCH, drop_remainder=True).repeat()
    model.fit(data, epochs=epochs, steps_per_epoch=per_epoch, verbose=0, callbacks=callbacks)
    times = np.bincount(ids[:, 0], minlength=ROWS)[:, np.newaxis]
    expected = -times / BATCH / DIM * np.ones((1, DIM))
    found = model.get_weights()[0]
    difference = float(np.abs(found - expected).max())
    print(f"end iterations={int(model.optimizer.iterations.numpy())} off={difference:.1e}")


if __name__ == "__main__":
    main()
