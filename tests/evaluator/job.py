"""Trains in a cluster, and evaluates beside it: job.py FOLDER."""

from tests import quick_start  # noqa: F401

# isort: split
import json
import pathlib
import sys
import time

import keras
import numpy as np

import keras_psplus as psp

EPOCHS, PATIENCE = 3, 60


class UntilEvaluated(keras.callbacks.Callback):
    """Holds the last epoch until the evaluator, which was killed, is there again."""

    def __init__(self, folder):
        super().__init__()
        self._logs = folder / "logs" / "evaluator-0.log"

    def on_epoch_begin(self, epoch, logs=None):
        deadline = time.monotonic() + PATIENCE
        while epoch == EPOCHS - 1 and "evaluated 1.weights.h5" not in self._logs.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def main():
    folder = pathlib.Path(sys.argv[1])
    checkpoints = folder / "checkpoints"
    strategy = psp.strategy_from_env()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(4)]
        )
        model.compile("adam", "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
    y = x[:, :4]
    if psp.task_type() == "evaluator":
        board = keras.callbacks.TensorBoard(folder / "board")
        evaluator = psp.SidecarEvaluator(
            model, (x, y), checkpoints, callbacks=[board], poll_seconds=0.1
        )
        evaluator.start()
        return
    checkpoint = keras.callbacks.ModelCheckpoint
    history = model.fit(
        *(x, y),
        batch_size=8,
        epochs=EPOCHS,
        verbose=0,
        validation_data=(x, y),
        callbacks=[
            checkpoint(checkpoints / "{epoch}.weights.h5", save_weights_only=True),
            checkpoint(checkpoints / "last.keras"),
            UntilEvaluated(folder),
        ],
    ).history
    if strategy.is_chief:
        (folder / "history.json").write_text(json.dumps(history))


if __name__ == "__main__":
    main()
