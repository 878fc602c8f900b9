"""Breaks `fit` off in the middle of an epoch and goes on from the last backup, in many ways.

steps_job.py FOLDER CASE ...

For each case, one call of `fit` is left alone, and one is broken off and made again: by another
script's seeds, so that whatever is equal after that has come from the backup. The chief prints
lines of JSON: the case, and what differs.
"""

import contextlib
import json
import os
import pathlib
import random
import signal
import sys
import threading
import types

from tests import quick_start  # noqa: F401

# isort: split
import grain
import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.core import seeds
from keras_psplus.core.backup import store
from tests.faults.at_batch import AtBatch
from tests.support.parts import Interrupted

ROWS, BATCH, EPOCHS = 70, 10, 4


def interrupt():
    raise Interrupted


class DieInWrite(keras.callbacks.Callback):
    """Kills this process while its thread writes a backup, once training has gone on beside it."""

    def __init__(self, number):
        super().__init__()
        self.is_writing, self.trains_on = threading.Event(), False
        self._begun, self._first_after = 0, number * CASES["dies in a write"][2] + 1
        keras_own = store.saving_lib

        class Store(keras_own.H5IOStore):
            entries, files = 0, 0

            def __init__(own, *args, **kwargs):
                super().__init__(*args, **kwargs)
                if kwargs.get("mode") == "w":
                    Store.files, Store.entries = Store.files + 1, 0

            def make(own, *args, **kwargs):
                Store.entries += 1
                if (Store.files, Store.entries) == (number, 3):
                    self.is_writing.set()
                    threading.Event().wait()
                return super().make(*args, **kwargs)

        names = {**vars(keras_own), "H5IOStore": Store}
        store.saving_lib = types.SimpleNamespace(**names)

    def on_train_batch_begin(self, batch, logs=None):
        self._begun += 1
        if self._begun == self._first_after:
            # A thread that is slow to begin would still be at it when the next backup waits for it.
            self.is_writing.wait(60)
        self.trains_on = self.is_writing.is_set()

    def on_train_batch_end(self, batch, logs=None):
        if self.trains_on:
            print("trains on", flush=True)
            # Not by the thread, which may come to it some batches later.
            os.kill(os.getpid(), signal.SIGKILL)


class Counter(keras.callbacks.Callback):
    """A script's own callback, with a state."""

    batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x) // BATCH

    def __getitem__(self, index):
        part = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[part], self.y[part]


def arrays(x, y):
    return {"x": x, "y": y, "batch_size": BATCH}


def dataset_of_unknown_length(x, y):
    data = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda x, y: True)
    return {"x": data.shuffle(len(x)).batch(BATCH)}


def py_dataset(x, y):
    return {"x": Batches(x, y)}


def grain_dataset(x, y):
    rows = list(zip(x, y, strict=True))
    return {"x": grain.MapDataset.source(rows).shuffle(seed=3).batch(BATCH)}


# By name: data, options of compile(), how often a backup is made, and where the job ends.
CASES = {
    "at the end of an epoch": (arrays, {}, 7, (2, 2)),
    "epochs": (arrays, {}, "epoch", (2, 2)),
    "dataset of unknown length": (dataset_of_unknown_length, {}, 3, (2, 5)),
    "PyDataset": (py_dataset, {}, 3, (2, 5)),
    "Grain": (grain_dataset, {}, 3, (2, 5)),
    "dies in a write": (arrays, {}, 3, None),
    "own train_step": (arrays, {}, 3, (2, 5)),
}


def with_own_train_step(model, rate):
    """A model whose train_step changes more than Keras knows: a GAN's, say, with its optimizers.

    One of its optimizers is an attribute of it, another one is in a closure, like a metric and a
    variable.
    """
    of_bias = keras.optimizers.RMSprop(rate)
    worst, count = keras.metrics.Sum(name="worst"), tf.Variable(0.0, trainable=False)

    class Own(keras.Model):
        def __init__(self):
            super().__init__(model.inputs, model.outputs)
            self.of_first = keras.optimizers.Adam(rate)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            first, biases, rest = [], [], []
            for variable in self.trainable_variables:
                is_bias = variable.name == "bias"
                (biases if is_bias else rest if first else first).append(variable)
            every = [*first, *biases, *rest]
            grads = tape.gradient(loss, every)
            parts = [grads[: len(first)], grads[len(first) : -len(rest)], grads[-len(rest) :]]
            self.of_first.apply(parts[0], first)
            of_bias.apply(parts[1], biases)
            self.optimizer.apply(parts[2], rest)
            count.assign_add(1.0)
            worst.update_state(tf.reduce_sum(x))
            self._loss_tracker.update_state(loss)
            return {"loss": self._loss_tracker.result()}

    own = Own()
    own.to_compare = lambda: [
        *own.of_first.variables,
        *of_bias.variables,
        *worst.variables,
        count,
    ]
    return own


def main():
    folder, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
    strategy = psp.MultiWorkerMirroredStrategy()
    own = folder / (strategy.task.name if strategy.task else "alone")
    own.mkdir(exist_ok=True)
    if names == ["dies in a write"]:
        more = [] if (own / names[0]).exists() else [DieInWrite(6)]
        found = trainer(strategy, own)(*names, 1, *names, more=more)
        print(json.dumps([*names, *found]), flush=True)
        return
    if names[:1] == ["refused"]:
        print(json.dumps(["refused", *refused(strategy, own)]), flush=True)
        del names[0]
    train = trainer(strategy, own)
    for name in names or CASES:
        whole = train(name, 1, f"{name} whole")
        broken_off = False
        try:
            train(name, 1, name, CASES[name][3])
        except Interrupted:
            broken_off = True
        # Keras shuffles, where one process trains, by seeds that the script has to set.
        resumed = train(name, 2 if strategy.task else 1, name)
        differing = [k for (k, a), (_, b) in zip(whole, resumed, strict=True) if a != b]
        print(json.dumps([name, broken_off, differing, whole]), flush=True)


def refused(strategy, folder):
    """What is said of backups that cannot be."""
    (folder / "file").write_text("in the way")

    def error_of(units, backup, optimizer="sgd", batch_size=2, more=(), **options):
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(units)])
            model.compile(optimizer, "mse")
        backup = keras.callbacks.BackupAndRestore(folder / backup, **options)
        data = {"x": np.ones((8, 1)), "y": np.ones((8, units)), "batch_size": batch_size}
        try:
            model.fit(**data, verbose=0, callbacks=[backup, *more])
        except (OSError, ValueError) as error:
            return f"{error}"
        return None

    assert error_of(2, "other", delete_checkpoint=False) is None
    with contextlib.suppress(Interrupted):
        error_of(2, "in an epoch", save_freq=1, more=[AtBatch(0, 2, interrupt)])
    return [
        error_of(2, "never", save_freq=-1),
        error_of(2, "file/backup"),
        error_of(3, "other"),
        error_of(2, "in an epoch", "rmsprop", save_freq=1),
        error_of(2, "in an epoch", batch_size=4, save_freq=1),
    ]


def trainer(strategy, folder):
    """Function that trains a case, with a folder for its backup, and returns all that came of it.

    Its result is a list of pairs of names and of what can be turned into JSON.
    """
    random_numbers = np.random.default_rng(0)
    x = random_numbers.normal(size=(ROWS, 4)).astype("float32")
    noise = random_numbers.normal(size=(ROWS, 1))
    y = (x.sum(1, keepdims=True) + noise).astype("float32")

    def train(name, seed, backup, at=None, more=()):
        data, options, frequency, _ = CASES[name]
        # As a script without seeds, if this one is in a cluster.
        (random.seed if strategy.task else keras.utils.set_random_seed)(seed)
        # It is the first that draws seeds of data.
        seeds.restore([*seeds.state()[:-1], 0])
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((4,)),
                    keras.layers.Dense(6, "relu"),
                    keras.layers.Dropout(0.3),
                    keras.layers.Dense(1),
                ]
            )
            if name == "own train_step":
                model = with_own_train_step(model, 0.05)
            model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"], **options)
        validation = {"validation_data": (x[:20], y[:20]), "validation_batch_size": 20}
        log, counter = folder / f"{backup}.csv", Counter()
        best = folder / f"{backup}.weights.h5"
        callbacks = [
            keras.callbacks.BackupAndRestore(folder / backup, save_freq=frequency),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=1.0),
            keras.callbacks.EarlyStopping(
                "loss", patience=EPOCHS, restore_best_weights=True, mode="max"
            ),
            keras.callbacks.ModelCheckpoint(best, save_best_only=True, save_weights_only=True),
            keras.callbacks.CSVLogger(log),
            counter,
            *([AtBatch(*at, interrupt)] if at else []),
            *more,
        ]
        history = model.fit(
            **data(x, y),
            epochs=EPOCHS,
            verbose=0,
            callbacks=callbacks,
            # What takes longest is tracing.
            **(validation if name == "PyDataset" else {}),
        )
        variables = [*model.variables, *model.optimizer.variables]
        variables += getattr(model, "to_compare", list)()
        found = {f"variable {i}": v.numpy().tolist() for i, v in enumerate(variables)}
        found |= {f"history of {k}": v for k, v in history.history.items()}
        found["epochs"], found["batches"] = history.epoch, counter.batches
        found["log"] = log.read_text() if strategy.is_chief else ""
        for stopping in callbacks:
            if isinstance(stopping, keras.callbacks.EarlyStopping):
                found["best epoch"] = stopping.best_epoch
        return list(found.items())

    return train


if __name__ == "__main__":
    main()
