"""Interrupts training on two workers, damages what they keep beside the backup, and goes on.

worker_states_job.py FOLDER

Prints lines of JSON: what was done, the epochs that followed, and the weights or the error.
"""

import json
import pathlib
import shutil
import sys

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np

import keras_psplus as psp
from tests.faults.damage import backups, flip
from tests.support.parts import Interrupt, Interrupted


def main():
    folder = pathlib.Path(sys.argv[1])
    strategy = psp.MultiWorkerMirroredStrategy(updates=psp.updates.Accumulate(3))
    control, is_chief = strategy.extended.control, strategy.is_chief
    random = np.random.default_rng(0)
    x, y = random.normal(size=(32, 4)), random.normal(size=(32, 1))

    def train(what, backup, *callbacks, **options):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1, name="sgd"), "mse")
        callbacks = [keras.callbacks.BackupAndRestore(backup, **options), *callbacks]
        fit = {"batch_size": 8, "epochs": 4, "shuffle": False, "verbose": 0}
        try:
            epochs = model.fit(x, y, callbacks=callbacks, **fit).epoch
            ending = [float(w) for weights in model.get_weights() for w in weights.ravel()]
        except Interrupted:
            return
        except OSError as error:
            epochs, ending = None, f"{error}"
        print(json.dumps([what, epochs, ending]), flush=True)

    def on_chief(work):
        control.exchange("test", "before")
        if is_chief:
            work()
        control.exchange("test", "after")

    def copy(name):
        return folder / shutil.copytree(folder / "interrupted", folder / name)

    def file_of_worker_1(backup):
        (path, *_) = sorted(backup.glob("compression/worker-1-*.zip"))[-1:]
        return path

    train("whole", folder / "whole")
    train("", folder / "interrupted", Interrupt(), double_checkpoint=True)

    on_chief(lambda: flip(file_of_worker_1(copy("other worker"))))
    train("other worker", folder / "other worker", double_checkpoint=True)

    def damage_all():
        for backup in backups(copy("all")):
            flip(backup / "latest.weights.h5")

    on_chief(damage_all)
    train("all", folder / "all", double_checkpoint=True)

    # Without what workers had kept, as Keras itself writes a state.
    def take_out():
        last, _ = backups(copy("of Keras"))
        shutil.rmtree(folder / "of Keras" / "latest.weights.h5")
        for name in ("latest.weights.h5", "training_metadata.json"):
            (last / name).rename(folder / "of Keras" / name)
        (folder / "of Keras" / "LATEST").unlink()

    on_chief(take_out)
    train("of Keras", folder / "of Keras", double_checkpoint=True)

    # A disk of its own, on which nothing can be written.
    own = folder / f"own-{strategy.task.name}"
    shutil.copytree(folder / "interrupted", own) if is_chief else own.mkdir()
    if not is_chief:
        (own / "compression").write_text("in the way")
    before = sorted(path.name for path in own.rglob("*"))
    train("full", own, delete_checkpoint=False)
    assert before == sorted(path.name for path in own.rglob("*"))


if __name__ == "__main__":
    main()
