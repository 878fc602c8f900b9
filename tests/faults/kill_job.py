"""Trains a model that can be killed at any point of a save, for `kill_sweep.py` and its test.

kill_job.py KIND FOLDER [own]

KIND is diloco, powersgd, accumulate, hybrid or sync_ps. After each epoch every process that trains
prints `epoch E HASH`, a hash of its weights. With `own`, each worker has a folder of its own.
The environment may say `KILL=TASK:VICTIM:NUMBER`: at that many points of saves (operations on files
and messages of the control plane), from the first save after its start on, TASK kills VICTIM.
"""

import hashlib
import json
import os
import pathlib
import signal
import sys

EPOCHS, BATCHES, ROWS = 24, 4, 8


def own_name():
    """This process's name in the cluster."""
    own = json.loads(os.environ["TF_CONFIG"])["task"]
    return f"{own['type']}-{own['index']}"


class Killer:
    """Counts points, and kills a process at one of them.

    Attributes:
        counts: Whether points are counted now.
    """

    def __init__(self, folder):
        self.counts, self._number = False, 0
        task, self._victim, at = os.environ.get("KILL", "nobody::0").split(":")
        self._at = int(at) if task == own_name() else None
        self._folder = folder

    def point(self):
        """One more point."""
        if not self.counts or self._at is None:
            return
        self._number += 1
        if self._number == self._at:
            print(f"kills {self._victim}", flush=True)
            os.kill(int((self._folder / f"{self._victim}.pid").read_text()), signal.SIGKILL)

    def around(self, owner, name):
        """Makes the beginning and the end of a function's calls points."""
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            self.point()
            result = function(*args, **kwargs)
            self.point()
            return result

        setattr(owner, name, counted)

    def audited(self, event, args):
        """An audit hook: what is done to files."""
        if event in ("os.remove", "os.rmdir", "os.mkdir", "os.rename") or (
            event == "open" and isinstance(args[1], str) and "w" in args[1]
        ):
            self.point()


def main():
    kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    (folder / f"{own_name()}.pid").write_text(str(os.getpid()))

    from tests import quick_start  # noqa: F401

    # isort: split
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_psplus as psp
    from keras_psplus.core.backup import backup_callback
    from keras_psplus.core.jobs.control import ControlPlane

    is_int8 = kind in ("diloco", "accumulate")
    compressor = "int8" if is_int8 else psp.compression.PowerSGD(2, min_compression_rate=0)
    compressor = psp.compression.get(compressor)
    compressor = psp.compression.ByVariable({"*": compressor}, min_size=1, min_rank=0)
    updates = {"diloco": psp.updates.DiLoCo(3), "accumulate": psp.updates.Accumulate(3)}.get(kind)
    if kind == "sync_ps":
        strategy = psp.ParameterServerStrategy(mode="sync", compression=compressor)
    elif kind == "hybrid":
        strategy = psp.HybridStrategy(
            placement={"*/embeddings": "parameter_server"},
            compression=compressor,
            updates=psp.updates.Accumulate(3),
        )
    else:
        strategy = psp.MultiWorkerMirroredStrategy(compression=compressor, updates=updates)

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((), dtype="int32"),
                keras.layers.Embedding(16, 8),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(8, activation="relu"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")

    killer = Killer(folder)
    for owner, name in (
        (tf.io.gfile, "rename"),
        (tf.io.gfile, "remove"),
        (tf.io.gfile, "makedirs"),
        (tf.train.Checkpoint, "write"),
        (ControlPlane, "_put"),
        (ControlPlane, "_get"),
        (model, "save_weights"),
    ):
        killer.around(owner, name)
    sys.addaudithook(killer.audited)
    save = backup_callback.save

    def counted(*args):
        killer.counts = True
        save(*args)
        killer.point()
        killer.counts = False

    backup_callback.save = counted

    class Tell(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            weights = b"".join(np.asarray(w).tobytes() for w in self.model.get_weights())
            print(f"epoch {epoch} {hashlib.md5(weights).hexdigest()}", flush=True)

    random = np.random.default_rng(0)
    rows = BATCHES * ROWS
    x = random.integers(16, size=rows).astype("int32")
    y = random.normal(size=(rows, 1)).astype("float32")
    place = folder / (f"backup-{own_name()}" if "own" in sys.argv[3:] else "backup")
    model.fit(
        x,
        y,
        batch_size=ROWS,
        epochs=int(os.environ.get("EPOCHS", EPOCHS)),
        shuffle=False,
        verbose=0,
        callbacks=[Tell(), keras.callbacks.BackupAndRestore(place, delete_checkpoint=False)],
    )


if __name__ == "__main__":
    main()
