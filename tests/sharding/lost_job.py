"""Trains with backups in a cluster of which a worker may be lost.

lost_job.py STRATEGY FOLDER [VICTIM]

STRATEGY is a value of `shard`, or a mesh, such as 2x1, or both: 2x2/optimizer. Without a victim,
the chief reads what the optimizer keeps once more when the scripts of the others have ended.
"""

import os
import pathlib
import signal
import sys

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np

import keras_psplus as psp
from tests.sharding import cases
from tests.support.jobs import wait_for


class Dying(keras.callbacks.Callback):
    """Kills this worker in a step, while the others wait for its gradients."""

    def __init__(self, dies):
        super().__init__()
        self._dies = dies

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        print("epoch", epoch, "begins", flush=True)

    def on_train_batch_begin(self, batch, logs=None):
        if self._dies and (self._epoch, batch) == (2, 1):
            os.kill(os.getpid(), signal.SIGKILL)


def main(kind, folder, victim=None):
    if "x" in kind:
        shape, _, shard = kind.partition("/")
        mesh = psp.DeviceMesh(tuple(map(int, shape.split("x"))), ("batch", "model"))
        strategy = psp.ModelParallelStrategy(mesh=mesh, shard=shard or None)
    else:
        strategy = psp.MultiWorkerMirroredStrategy(shard=kind)
    task, folder = strategy.task, pathlib.Path(folder)
    keras.utils.set_random_seed(1)
    backup = keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
    with strategy.scope():
        model, found = cases.backed_up([backup, Dying(task.name == victim)])
    np.savez(folder / f"{task.name}.npz", **found)
    if strategy.is_chief:
        wait_for(lambda: strategy.extended.store._has_left)
        slots = [variable.numpy() for variable in model.optimizer.variables]
        np.savez(folder / "ended.npz", **{f"slots/{i}": slot for i, slot in enumerate(slots)})


if __name__ == "__main__":
    main(*sys.argv[1:])
