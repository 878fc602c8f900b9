"""Trains until something is in the job's JSON log: status_job.py FOLDER EVENT TASK.

What `keras-psplus status --json` and `keras-psplus status` print then goes into the folder.
"""

from tests import quick_start  # noqa: F401

# isort: split
import contextlib
import io
import json
import os
import pathlib
import sys
import time

import keras
import numpy as np

import keras_psplus as psp
from keras_psplus.cli import status

PATIENCE = 100


class TrainUntil(keras.callbacks.Callback):
    """Ends the training at the first step after an event of a task, and after one summary."""

    def __init__(self, folder, event, task, is_chief):
        super().__init__()
        self._folder, self._wanted, self._is_chief = folder, (event, task), is_chief
        self._deadline = time.monotonic() + PATIENCE

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)

    def on_epoch_end(self, epoch, logs=None):
        # Not within an epoch, whose next step the others would wait for.
        assert time.monotonic() < self._deadline
        lines = pathlib.Path(os.environ["KERAS_PSPLUS_JSON_LOG"]).read_text().splitlines()
        lines = list(map(json.loads, lines))
        # A slow machine may be waited for before the fault, and go on after it.
        is_wait = self._wanted[0] == "stall_over"
        mark, text = ("stall", "(no answer)") if is_wait else ("fault", "")
        marks = [
            i
            for i, line in enumerate(lines)
            if line["event"] == mark and text in line.get("message", "")
        ]
        since = marks[0] if marks else len(lines)
        told = [(line["event"], line.get("task")) for line in lines]
        seen = [e for i, e in enumerate(told) if i > since or e[0] in ("steps", "task_started")]
        own = ("steps", "chief-0" if ("task_started", "chief-0") in seen else "worker-0")
        if self._wanted in seen and own in seen and self._serves_again():
            if self._is_chief and not self.model.stop_training:
                for name, flags in (("status.json", ["--json"]), ("status.txt", [])):
                    with contextlib.redirect_stdout(io.StringIO()) as printed:
                        assert status.main(flags) == 0
                    (self._folder / name).write_text(printed.getvalue())
            self.model.stop_training = True

    def _serves_again(self):
        """Whether a worker that was started again has found the chief: it would wait for it."""
        if self._wanted[0] != "task_restarted":
            return True
        log = (self._folder / "logs" / f"{self._wanted[1]}.log").read_text()
        time.sleep(0.2)
        return log.count("serves on") == 2


def main():
    folder, event, task = pathlib.Path(sys.argv[1]), *sys.argv[2:]
    strategy = psp.ParameterServerStrategy() if event == "task_restarted" else all_reduce()
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        model.compile("sgd", "mse", metrics=["mae"])
    x = np.ones((64, 8), "float32")
    until = TrainUntil(folder, event, task, strategy.is_chief)
    # Workers stop together, at the end of the epoch in which the first one does.
    model.fit(x, x[:, :4], batch_size=8, epochs=999, verbose=0, callbacks=[until])


def all_reduce():
    return psp.MultiWorkerMirroredStrategy(stall_warning=1.0)


if __name__ == "__main__":
    main()
