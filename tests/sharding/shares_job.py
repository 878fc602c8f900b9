"""Trains with the optimizer's state in shares, or in one process.

shares_job.py FOLDER CASE,CASE...

What each case leaves is written to `<folder>/<case>.<task>.npz`.
"""

import contextlib
import os
import pathlib
import signal
import sys
import time
import traceback
from unittest import mock

from tests import quick_start, references  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.sharding import store

O = keras.optimizers  # noqa: E741


class NormalizedAdam(O.Adam):
    """An optimizer of a user's, whose update needs the norm of a whole gradient."""

    def update_step(self, gradient, variable, learning_rate):
        norm = tf.norm(tf.convert_to_tensor(gradient))
        super().update_step(gradient / (1e-7 + norm), variable, learning_rate)


class CountingSGD(O.SGD):
    """An optimizer of a user's with a variable that all updates change."""

    def build(self, variables):
        super().build(variables)
        self.count = self.add_variable((), name="count")

    def update_step(self, gradient, variable, learning_rate):
        self.count.assign_add(1.0)
        super().update_step(gradient * self.count, variable, learning_rate)


JIT = True if "COMPILES" in os.environ else "auto"


def adamw():
    optimizer = O.AdamW(1e-2, weight_decay=0.05, global_clipnorm=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "sgd": lambda: O.SGD(0.05),
    "momentum_clipnorm": lambda: O.SGD(0.05, momentum=0.9, nesterov=True, clipnorm=0.1),
    "adam_clipvalue": lambda: O.Adam(1e-2, amsgrad=True, clipvalue=0.01),
    "adamw": adamw,
    "rmsprop": lambda: O.RMSprop(1e-3, momentum=0.9, centered=True),
    "nadam": lambda: O.Nadam(1e-3),
    "adamax": lambda: O.Adamax(1e-3),
    "adagrad": lambda: O.Adagrad(1e-2),
    "adadelta": lambda: O.Adadelta(1.0),
    "ftrl": lambda: O.Ftrl(1e-2, l1_regularization_strength=1e-3),
    "lion": lambda: O.Lion(1e-3),
    "schedule_free": lambda: O.ScheduleFreeAdamW(1e-2, warmup_steps=3),
    "average": lambda: O.Adam(1e-2, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
    "accumulate": lambda: O.Adagrad(1e-2, gradient_accumulation_steps=2, use_ema=True),
    "loss_scale": lambda: O.LossScaleOptimizer(
        O.Adam(1e-2, global_clipnorm=1.0), initial_scale=256.0, dynamic_growth_steps=3
    ),
    # Whole on one worker each.
    "muon": lambda: O.Muon(
        1e-2, global_clipnorm=0.5, weight_decay=0.1, use_ema=True, adam_weight_decay=0.01
    ),
    "adafactor": lambda: O.Adafactor(1e-2),
    "lamb": lambda: O.Lamb(1e-2, clipnorm=0.1),
    "normalized": lambda: NormalizedAdam(1e-2),
    # Whole on all.
    "counting": lambda: CountingSGD(1e-3),
}


def mlp(optimizer):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((7,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(6, activation="tanh", trainable=False),
            keras.layers.Dense(3),
        ]
    )
    return compiled(model, optimizer), np.random.RandomState(1).randn(50, 7).astype("float32")


def embedding(optimizer, rows=11):
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Embedding(rows, 3), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
    return compiled(model, optimizer), np.random.RandomState(1).randint(0, 7, (50, 4))


def compiled(model, optimizer):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=JIT)
    return model


class TwoOptimizers(keras.Model):
    """A model whose step trains its halves by optimizers of their own, and logs a norm."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(3)
        self.other = O.Adagrad(0.05)
        self.norm = keras.metrics.Mean("norm")

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        grads = tape.gradient(loss, self.trainable_variables)
        self.norm.update_state(tf.linalg.global_norm(grads))
        self.optimizer.apply(grads[:2], self.first.trainable_variables)
        self.other.apply(grads[2:], self.second.trainable_variables)
        return {"loss": loss, "norm": self.norm.result()}


def fit(model, x, epochs=2, batch_size=8, **kwargs):
    y = np.random.RandomState(2).randint(0, 3, len(x))
    options = dict(batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    return model.fit(x, y, **options, **kwargs).history


def left(model, history, others=()):
    slots = [v for optimizer in [model.optimizer, *others] for v in optimizer.variables]
    return (
        {f"history/{name}": np.asarray(values) for name, values in history.items()}
        | {f"weights/{i}": value for i, value in enumerate(model.get_weights())}
        | {f"slots/{i}": variable.numpy() for i, variable in enumerate(slots)}
    )


def trained(name):
    kind, _, optimizer = name.rpartition("/")
    model, x = (embedding if kind else mlp)(OPTIMIZERS[optimizer]())
    # By `fit`, Keras builds it in a trace, where the first values of ScheduleFreeAdamW are lost.
    model.optimizer.build(model.trainable_variables)
    return model, x, left(model, fit(model, x))


def two_optimizers():
    keras.utils.set_random_seed(3)
    model = TwoOptimizers()
    model.compile(O.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.RandomState(1).randn(50, 7).astype("float32")
    model(x[:1])
    model.optimizer.build(model.first.trainable_variables)
    model.other.build(model.second.trainable_variables)
    return left(model, fit(model, x), [model.other])


def files(folder, strategy):
    """Files of all workers and of the chief alone, whose slots the others are not asked for."""
    model, x, found = trained("average")
    task = strategy.task.name if strategy else "one"
    model.save(folder / f"all.{task}.keras")
    if strategy is None or strategy.is_chief:
        model.save_weights(folder / "alone.weights.h5")
        tf.train.Checkpoint(optimizer=model.optimizer).write(str(folder / "alone.checkpoint"))
    found |= {f"later/{k}": v for k, v in left(model, fit(model, x, epochs=1)).items()}
    # After `fit`, the weights are their averages.
    model.train_on_batch(x[:8], np.arange(8) % 3)
    swap = keras.callbacks.SwapEMAWeights()
    swap.set_model(model)
    swap._swap_variables()
    found |= {f"swapped/{i}": value for i, value in enumerate(model.get_weights())}
    swap._finalize_ema_values()
    # The others are at changing averages before the chief has read them.
    late = store.ShareStore.read if strategy is None or not strategy.is_chief else read_late
    with mock.patch.object(store.ShareStore, "read", late):
        for average in model.optimizer._model_variables_moving_average:
            average.assign(average.numpy() + 1)
    model.set_weights([value + 1 for value in model.get_weights()])
    return found | {f"set/{k}": v for k, v in left(model, {}).items()}


def read_late(self, variable, read=store.ShareStore.read):
    time.sleep(0.05)
    return read(self, variable)


def loaded(folder, path):
    """Goes on from a file that another number of workers has written."""
    model = keras.models.load_model(path)
    x = np.random.RandomState(1).randn(50, 7).astype("float32")
    found = {f"read/{i}": v.numpy() for i, v in enumerate(model.optimizer.variables)}
    return found | {f"later/{k}": v for k, v in left(model, fit(model, x, epochs=1)).items()}


def ended(folder, strategy):
    """Case `adamw`, of which the chief reads slots when the scripts of the others have ended."""
    model, _, found = trained("adamw")
    np.savez(folder / f"adamw.{strategy.task.name}.npz", **found)
    if not strategy.is_chief:
        return {}
    time.sleep(2)
    return {f"ended/{i}": variable.numpy() for i, variable in enumerate(model.optimizer.variables)}


class Dying(keras.callbacks.Callback):
    """Kills a worker that is to die in a step, while the others wait for its gradients."""

    def __init__(self, dies, epoch, batch):
        super().__init__()
        self._dies, self._at = dies, (epoch, batch)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        print("epoch", epoch, "begins", flush=True)

    def on_train_batch_begin(self, batch, logs=None):
        if self._dies and (self._epoch, batch) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def backup(folder, dies):
    # Averages change in the batch after a backup, in which workers have nothing to send.
    model, x = mlp(O.Adam(1e-2, gradient_accumulation_steps=4, use_ema=True, ema_momentum=0.9))
    callbacks = [keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)]
    # The first epoch's weights, which the job that resumes has from the backup.
    callbacks.append(
        keras.callbacks.EarlyStopping("loss", mode="max", patience=9, restore_best_weights=True)
    )
    history = fit(model, x, epochs=4, callbacks=[*callbacks, Dying(dies, 2, 3)])
    return {k: v for k, v in left(model, history).items() if not k.startswith("history")}


def bytes_and_state(strategy):
    """Bytes of a step, and the sizes of what this worker keeps."""
    model, x = mlp(O.Adam(1e-2))
    communication = strategy.communication
    before, between = communication.wire_bytes, communication.between_groups_bytes
    fit(model, x, epochs=1)
    between = communication.between_groups_bytes - between
    slots = model.optimizer.variables[2:]
    after = communication.wire_bytes
    fit(*embedding(O.SGD(0.05), rows=1000), epochs=1)
    if strategy.is_chief:
        # Weights are whole on all workers.
        model.set_weights(model.get_weights())
    return {
        "of_table": np.asarray((communication.wire_bytes - after) / 7),
        "wire": np.asarray((after - before) / 7),
        "kept": np.asarray([slot._value.part.shape.num_elements() for slot in slots]),
        "whole": np.asarray([np.prod(slot.shape) for slot in slots]),
        "between": np.asarray(between / 7),
    }


def main(folder, names, cases=(), **options):
    strategy = None
    if os.environ.get("TF_CONFIG"):
        strategy = psp.MultiWorkerMirroredStrategy(**{"shard": "optimizer", **options})
    else:
        references.build_first()
    task = strategy.task.name if strategy else "one"
    others = {
        **dict(cases),
        "two_optimizers": two_optimizers,
        "files": lambda: files(folder, strategy),
        "ended": lambda: ended(folder, strategy),
        "load": lambda: loaded(folder, os.environ["LOADED"]),
        "dying": lambda: backup(folder, task == os.environ["VICTIM"]),
        "resumed": lambda: backup(folder, False),
        "bytes": lambda: bytes_and_state(strategy),
    }
    for name in names:
        if name == "adamw" and "ended" in names:
            continue
        keras.backend.clear_session()
        try:
            with strategy.scope() if strategy else contextlib.nullcontext():
                found = others[name]() if name in others else trained(name)[2]
        except Exception:
            if name == "dying":
                raise
            # Its test finds no file, and shows this; other cases go on.
            traceback.print_exc()
            continue
        np.savez(folder / f"{name.replace('/', '_')}.{task}.npz", **found)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2].split(","))
