"""Two calls of `fit` with one backup folder, behind a symbolic link, in a script that then fails.

shared_folder_job.py FOLDER

The script fails after its training at its first start that comes so far, unless FOLDER/failed is
there. The chief prints a line of JSON: how many batches this start has trained, and what came of
both calls.
"""

import json
import pathlib
import sys

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np

import keras_psplus as psp

EPOCHS, ROWS, BATCH = 3, 64, 8


def main():
    folder = pathlib.Path(sys.argv[1])
    strategy = psp.MultiWorkerMirroredStrategy()
    link, failed = folder / "link", folder / "failed"
    if strategy.is_chief and not link.is_symlink():
        (folder / "backup").mkdir()
        link.symlink_to(folder / "backup")
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    trained, histories = [], []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: trained.append(1))
    for rate in (0.1, 0.01):
        with strategy.scope():
            model.compile(keras.optimizers.Adam(rate), "mse")
        backup = keras.callbacks.BackupAndRestore(link, save_freq=5)
        options = {"batch_size": BATCH, "epochs": EPOCHS, "verbose": 0}
        histories.append(model.fit(x, y, callbacks=[backup, count], **options))
    if not strategy.is_chief:
        return
    if not failed.exists():
        failed.touch()
        raise RuntimeError("after the training")
    found = {
        **{f"weight {i}": w.tolist() for i, w in enumerate(model.get_weights())},
        **{f"losses {i}": h.history["loss"] for i, h in enumerate(histories)},
        "epochs": [h.epoch for h in histories],
    }
    print(json.dumps([len(trained), found]), flush=True)


if __name__ == "__main__":
    main()
