"""What workers of synchronous parameter servers train with lossy compressors, for a test.

sync_compression_job.py FOLDER
"""

import gc
import pathlib
import sys

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np

import keras_psplus as psp
from keras_psplus import compression
from keras_psplus.core.state import array_file
from tests.all_reduce.job_parts import Interrupt, Interrupted
from tests.parameter_server.compression_job import BATCH, LOSSY, dense, labels, rows

NAMES = ["bf16", "int8", "topk_corrected", "powersgd", "own"]
STEPS, EPOCHS = 5, 4


def train(model, *callbacks, epochs=1, shuffle=False):
    first = slice(STEPS * BATCH)
    options = dict(batch_size=BATCH, shuffle=shuffle, verbose=0, callbacks=list(callbacks))
    model.fit(rows[first], labels[first], epochs=epochs, **options)
    return model.get_weights()


def resumed(strategy, name, folder):
    """Weights without an interruption, and with one, after which each worker has its residuals."""

    def whole(*callbacks):
        # Its optimizer has a name that no other one has while both live.
        gc.collect()
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = dense(name, keras.optimizers.SGD(0.1, name=f"backed_up_{name}"))
        return train(model, *callbacks, epochs=EPOCHS, shuffle=True)

    disk = folder / f"disk-{name}"
    try:
        whole(keras.callbacks.BackupAndRestore(disk, save_freq=4), Interrupt(3))
    except Interrupted:
        pass
    *_, file = sorted((disk / "compression").iterdir())
    assert file.name.startswith("2-workers-step-"), file
    assert {name.split("/")[1] for name in array_file.read(file)} == {
        "worker-0-of-2",
        "worker-1-of-2",
    }
    return {"resumed": whole(keras.callbacks.BackupAndRestore(disk, save_freq=4)), "whole": whole()}


if __name__ == "__main__":
    folder, results = pathlib.Path(sys.argv[1]), {}
    push = {f"{name}/*": LOSSY[name] for name in NAMES}
    strategy = psp.ParameterServerStrategy(
        mode="sync", compression=compression.ByVariable(push, min_size=1, min_rank=0)
    )
    for name in sys.argv[2:]:
        with strategy.scope():
            model = dense(name)
        results[f"{name} before"] = model.get_weights()
        results[name] = train(model)
    # What keeps more than a residual.
    for how, weights in resumed(strategy, "powersgd", folder).items():
        results[f"powersgd {how}"] = weights
    arrays = {f"{name}/{i}": w for name, ws in results.items() for i, w in enumerate(ws)}
    np.savez(folder / "weights.npz", **arrays)
