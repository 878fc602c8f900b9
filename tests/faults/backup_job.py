"""Kills BackupAndRestore before each thing that it does to files, and looks what a start finds.

backup_job.py FOLDER [SMALL_DISK | --alone]

Prints a line of JSON for each kill: what was cut short, at which file operation, and which of the
states the next start has found, as pairs of the weights' value and the epoch. The same for a disk
that is full, if there is one that can be filled. With `--alone` there is one replica, and files are
damaged as well: see `damage.py`.
"""

import json
import os
import pathlib
import shutil
import sys

from tests import quick_start  # noqa: F401

# isort: split
import keras
import tensorflow as tf

import keras_psplus as psp
from tests.faults import damage

# As many numbers as make a file that can be cut short.
UNITS = 4000


class Killed(BaseException):
    """In the place of SIGKILL: no `except` that handles errors sees it."""


class Killer:
    """Ends what runs before its n-th operation on files.

    Attributes:
        left: How many operations are let through; None for all.
    """

    def __init__(self, model):
        self.left = None
        self._rename, tf.io.gfile.rename = tf.io.gfile.rename, self._renamed
        self._save, model.save_weights = model.save_weights, self._saved
        sys.addaudithook(self._audited)

    def _step(self):
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Killed

    def _audited(self, event, args):
        if event in ("os.remove", "os.rmdir", "os.mkdir", "os.rename") or (
            event == "open" and isinstance(args[1], str) and "w" in args[1]
        ):
            self._step()

    def _renamed(self, *args, **kwargs):
        self._step()
        self._rename(*args, **kwargs)

    def _saved(self, filepath, **kwargs):
        self._step()
        self._save(filepath, **kwargs)
        try:
            self._step()
        except Killed:
            with open(filepath, "r+b") as file:
                file.truncate(os.path.getsize(filepath) // 2)
            raise


def main():
    folder, is_alone = pathlib.Path(sys.argv[1]), "--alone" in sys.argv
    if not is_alone:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
        )
    with psp.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(UNITS, use_bias=False)])
        model.compile("sgd", "mse")
    killer = Killer(model)

    def callback(**options):
        made = keras.callbacks.BackupAndRestore(folder / "backup", **options)
        made.set_model(model)
        made.set_params({"epochs": 5})
        return made

    def save(epoch, **options):
        model.set_weights([keras.ops.full((1, UNITS), float(epoch))])
        made = callback(**options)
        made.on_epoch_end(epoch - 1)

    def found(**options):
        model.set_weights([keras.ops.zeros((1, UNITS))])
        model._initial_epoch = 0
        callback(**options).on_train_begin()
        (weights,) = model.get_weights()
        assert (weights == weights[0, 0]).all()
        return [float(weights[0, 0]), model._initial_epoch]

    def folders():
        return len(list(folder.glob("backup/backup-*")))

    def cut_short(what, act, before, **options):
        at, most = 0, 1 + len(options)
        is_killed = True
        while is_killed:
            killer.left = None
            shutil.rmtree(folder / "backup", ignore_errors=True)
            for epoch in before:
                save(epoch, **options)
            killer.left = at
            try:
                act(**options)
                is_killed = False
            except Killed:
                # At most those that count, and the one in writing.
                assert folders() <= most + 1
            killer.left = None
            print(json.dumps([what, at, found(**options)]), flush=True)
            assert is_killed or folders() <= most
            at += 1

    if is_alone:
        cut_short("alone", lambda **options: save(2, **options), [1])
        damage.print_cases(folder / "backup", save, found)
        return
    cut_short("first", lambda **options: save(1, **options), [])
    cut_short("next", lambda **options: save(2, **options), [1])
    cut_short("double", lambda **options: save(3, **options), [1, 2], double_checkpoint=True)
    cut_short("end", lambda **options: callback(**options).on_train_end(), [1, 2])

    if len(sys.argv) == 2:
        return
    folder = pathlib.Path(sys.argv[2])
    save(1)
    filling = folder / "filling"
    filling.write_bytes(b"0" * (shutil.disk_usage(folder).free - 4 * UNITS))
    try:
        save(2)
    except OSError as error:
        print(json.dumps(["full", f"{error}", found()]), flush=True)
    filling.unlink()
    save(3)
    print(json.dumps(["room", 0, found()]), flush=True)


if __name__ == "__main__":
    main()
