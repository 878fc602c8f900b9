"""Trains with backups every five steps: goodput_job.py FOLDER."""

import sys
import time

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np

import keras_psplus as psp


class Slow(keras.callbacks.Callback):
    """Makes each step take a while."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)


def main():
    strategy = psp.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
    x = np.ones((160, 8), "float32")
    backup = keras.callbacks.BackupAndRestore(sys.argv[1], save_freq=5, double_checkpoint=True)
    model.fit(
        *(x, x[:, :4]),
        batch_size=8,
        epochs=2,
        verbose=0,
        validation_data=(x, x[:, :4]),
        callbacks=[backup, Slow()],
    )


if __name__ == "__main__":
    main()
