"""Trains until something is in the job's JSON log: status_job.py FOLDER KIND.

What `keras-psplus status --json` and `keras-psplus status` print then goes into the folder.
"""

from tests import quick_start  # noqa: F401

# isort: split
import contextlib
import io
import json
import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np

import keras_psplus as psp
from keras_psplus.cli import status

PATIENCE = 100


def seen():
    """Pairs of event and task in the JSON log."""
    lines = pathlib.Path(os.environ["KERAS_PSPLUS_JSON_LOG"]).read_text().splitlines()
    return [(line["event"], line.get("task")) for line in map(json.loads, lines)]


def write_status(folder):
    for name, flags in (("status.json", ["--json"]), ("status.txt", [])):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert status.main(flags) == 0
        (folder / name).write_text(printed.getvalue())
    return json.loads((folder / "status.json").read_text())


class TrainUntil(keras.callbacks.Callback):
    """Ends the training of servers' workers when worker-1 is back."""

    def __init__(self, folder):
        super().__init__()
        self._folder, self._deadline = folder, time.monotonic() + PATIENCE

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)

    def on_epoch_end(self, epoch, logs=None):
        assert time.monotonic() < self._deadline
        log = (self._folder / "logs" / "worker-1.log").read_text()
        is_back = ("task_restarted", "worker-1") in seen() and log.count("serves on") == 2
        if is_back and ("steps", "chief-0") in seen():
            write_status(self._folder)
            self.model.stop_training = True


class LoseWorker(keras.callbacks.Callback):
    """Has the chief kill worker-1 once it has been waited for; ends the attempt after that."""

    def __init__(self, folder, is_chief):
        super().__init__()
        self._folder, self._is_chief, self._is_over = folder, is_chief, False
        self._deadline = time.monotonic() + PATIENCE

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
        # Two steps or more after a backup.
        if batch == 7 and self._is_over:
            (job,) = write_status(self._folder)
            os.kill(job["tasks"]["worker-1"]["pid"], signal.SIGKILL)

    def on_epoch_end(self, epoch, logs=None):
        assert time.monotonic() < self._deadline
        if os.environ["KERAS_PSPLUS_RESTART"] == "1":
            self.model.stop_training = True
        elif self._is_chief:
            (job,) = write_status(self._folder)
            self._is_over = (job["tasks"]["worker-0"].get("stall") or {}).get("is_over", False)


def main():
    folder, kind = pathlib.Path(sys.argv[1]), sys.argv[2]
    strategy = psp.ParameterServerStrategy() if kind == "servers" else all_reduce()
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse", metrics=["mae"])
    x = np.ones((80, 8), "float32")
    callbacks = [TrainUntil(folder)]
    if kind == "all_reduce":
        options = {"save_freq": 5, "double_checkpoint": True}
        callbacks = [LoseWorker(folder, strategy.is_chief)]
        callbacks += [keras.callbacks.BackupAndRestore(folder / "backup", **options)]
    model.fit(
        *(x, x[:, :4]),
        batch_size=8,
        epochs=999,
        verbose=0,
        validation_data=(x, x[:, :4]) if kind == "all_reduce" else None,
        callbacks=callbacks,
    )


def all_reduce():
    return psp.MultiWorkerMirroredStrategy(stall_warning=1.0)


if __name__ == "__main__":
    main()
