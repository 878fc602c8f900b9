"""Trains with a CommunicationMonitor in real processes: monitor_job.py FOLDER STRATEGY.

Each process that trains writes its History to `FOLDER/<task>.json`.
"""

import json
import pathlib
import sys
import time

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np

import keras_psplus

ROWS, BATCH = 44, 8  # six steps an epoch


class LastLogs(keras.callbacks.Callback):
    """Keeps the logs of each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(sorted(name for name in logs if name.startswith("comm/")))


def main():
    folder, kind = pathlib.Path(sys.argv[1]), sys.argv[2]
    make = getattr(keras_psplus, kind)
    strategy = make(compression="int8")
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
        model.compile("sgd", "mse", steps_per_execution=2)
    x = np.random.default_rng(0).normal(size=(ROWS, 64)).astype("float32")
    task, last = strategy.task.name, LastLogs()
    if task == "worker-1":  # on a slow link
        strategy.communication.add_source(lambda: [], lambda: 50 * time.monotonic())
    monitor = keras_psplus.callbacks.CommunicationMonitor(folder / f"tb-{task}")
    fits = [
        model.fit(
            *(x, x),
            batch_size=BATCH,
            epochs=2,
            validation_data=validation,
            callbacks=[monitor, last],
            verbose=0,
        ).history
        for validation in (None, (x, x))
    ]
    totals = {
        "logical": strategy.communication.logical_bytes,
        "wire": strategy.communication.wire_bytes,
    }
    alone = None
    if kind == "MultiWorkerMirroredStrategy":
        callbacks = [monitor] if strategy.is_chief else []
        alone = model.fit(x, x, batch_size=BATCH, callbacks=callbacks, verbose=0).history
    result = {"alone": alone, "fits": fits, "batches": last.seen, "totals": totals}
    (folder / f"{task}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
