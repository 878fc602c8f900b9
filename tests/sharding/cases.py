"""Training for tests of shares, and of weights cut along a mesh, in clusters and in one process."""

import contextlib
import pathlib
import time
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tests.support.parts import swapped

L, O = keras.layers, keras.optimizers  # noqa: E741
DIGITS = pathlib.Path(__file__).parents[2] / "examples" / "digits.npz"
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# One of three workers has no row of the last batch.
ROWS, BATCH, EPOCHS = 18, 8, 2


class CountingSGD(O.SGD):
    """An optimizer of a user's with a variable that all updates change."""

    def build(self, variables):
        super().build(variables)
        self.count = self.add_variable((), name="count")

    def update_step(self, gradient, variable, learning_rate):
        self.count.assign_add(1.0)
        super().update_step(gradient * self.count, variable, learning_rate)


def adamw():
    optimizer = O.AdamW(1e-2, weight_decay=0.05, global_clipnorm=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "sgd": lambda: O.SGD(0.05),
    "momentum_clipnorm": lambda: O.SGD(0.05, momentum=0.9, nesterov=True, clipnorm=0.1),
    "adam": lambda: O.Adam(1e-2),
    "adamw": adamw,
    "adagrad": lambda: O.Adagrad(1e-2),
    "average": lambda: O.Adam(1e-2, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3),
    "loss_scale": lambda: O.LossScaleOptimizer(
        O.Adam(1e-2, global_clipnorm=1.0), initial_scale=256.0, dynamic_growth_steps=3
    ),
    # As it grows, it takes some gradients out of range before others.
    "overflow": lambda: O.LossScaleOptimizer(
        O.SGD(0.05), initial_scale=2.0**126, dynamic_growth_steps=2
    ),
    "steps": lambda: O.Adam(
        1e-2, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.9, clipnorm=0.1
    ),
    # Whole on one worker each.
    "muon": lambda: O.Muon(
        1e-2,
        global_clipnorm=0.5,
        weight_decay=0.1,
        use_ema=True,
        ema_overwrite_frequency=3,
        adam_weight_decay=0.01,
    ),
    "muon_steps": lambda: O.LossScaleOptimizer(
        O.Muon(1e-2, clipnorm=0.1, gradient_accumulation_steps=2), initial_scale=256.0
    ),
    "lamb": lambda: O.Lamb(1e-2),
    "adafactor": lambda: O.Adafactor(1e-2),
    # Whole on all.
    "counting": lambda: CountingSGD(1e-3),
}


def task_here():
    """The task of the strategy in whose scope this is, or None in plain Keras."""
    return tf.distribute.get_strategy().task if tf.distribute.has_strategy() else None


def numbers(*shape):
    return np.random.RandomState(1).randn(*shape).astype("float32")


def mlp(optimizer):
    """Layers of which tensor parallelism cuts the first."""
    layers = [
        L.Dense(8, activation="tanh"),
        L.BatchNormalization(synchronized=True),
        L.Dense(6, activation="tanh", trainable=False),
        L.Dense(3),
    ]
    return compiled(keras.Sequential([keras.Input((7,)), *layers]), optimizer), numbers(ROWS, 7)


def embedding(optimizer, tokens=11, rows=ROWS):
    layers = [L.Embedding(tokens, 4), L.Flatten(), L.Dense(3)]
    model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
    return compiled(model, optimizer), np.random.RandomState(1).randint(0, 7, (rows, 4))


def compiled(model, optimizer, jit_compile=False, metrics=None):
    model.compile(optimizer, LOSS, metrics=metrics, jit_compile=jit_compile)
    # By `fit`, Keras builds it in a trace, where the first values of ScheduleFreeAdamW are lost.
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model, x, **kwargs):
    rows = len(next(iter(x.values())) if isinstance(x, dict) else x)
    y = np.random.RandomState(2).randint(0, 3, rows)
    settings = dict(batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return model.fit(x, y, **settings | kwargs).history


def left(model, history=(), others=()):
    """Logs, weights, and the variables of optimizers."""
    slots = [v for optimizer in [model.optimizer, *others] for v in optimizer.variables]
    return (
        {f"history/{name}": history[name] for name in history}
        | {f"weights/{i}": value for i, value in enumerate(model.get_weights())}
        | {f"slots/{i}": variable.numpy() for i, variable in enumerate(slots)}
    )


def of(name):
    """Model and data of a case, whose name is an optimizer's or `embedding/OPTIMIZER`."""
    kind, _, optimizer = name.rpartition("/")
    return (embedding if kind else mlp)(OPTIMIZERS[optimizer]())


def trained(name):
    model, x = of(name)
    return left(model, fit(model, x))


class TwoOptimizers(keras.Model):
    """A model whose step trains its halves by optimizers of their own, and logs a norm."""

    def __init__(self):
        super().__init__()
        self.first, self.second = L.Dense(5, activation="tanh"), L.Dense(3)
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


def made_of_two(x):
    model = TwoOptimizers()
    model.compile(O.Adam(0.01), LOSS, jit_compile=False)
    model(x[:1])
    model.optimizer.build(model.first.trainable_variables)
    model.other.build(model.second.trainable_variables)
    return model


def files(folder=None, name="average"):
    """Files of all workers and of the chief alone, whose slots the others are not asked for."""
    model, x = of(name)
    found, task = left(model, fit(model, x)), task_here()
    if task is not None:
        model.save(f"{folder}/all.{task.name}.keras")
        if task.is_chief:
            model.save_weights(f"{folder}/alone.weights.h5")
            tf.train.Checkpoint(optimizer=model.optimizer).write(f"{folder}/alone.checkpoint")
    found |= {f"later/{k}": v for k, v in left(model, fit(model, x, epochs=1)).items()}
    # After `fit`, the weights are their averages.
    model.train_on_batch(x[:8], np.arange(8) % 3)
    swap = keras.callbacks.SwapEMAWeights()
    swap.set_model(model)
    swap._swap_variables()
    found |= {f"swapped/{i}": value for i, value in enumerate(model.get_weights())}
    swap._finalize_ema_values()
    with reads_late() if task is not None and task.is_chief else contextlib.nullcontext():
        for average in model.optimizer._model_variables_moving_average:
            average.assign(average.numpy() + 1)
    model.set_weights([value + 1 for value in model.get_weights()])
    return found | {f"set/{k}": v for k, v in left(model).items()}


def reads_late():
    """Has other workers be at changing variables before this one has read them."""
    from keras_psplus.sharding.store import ShareStore

    def read(self, variable, read=ShareStore.read):
        time.sleep(0.05)
        return read(self, variable)

    return mock.patch.object(ShareStore, "read", read)


def loaded(path, to=None, epochs=1):
    """Goes on from a file that another number of workers has written, and may write one."""
    model = keras.models.load_model(path)
    found = {f"slots/{i}": v.numpy() for i, v in enumerate(model.optimizer.variables)}
    for _ in range(epochs):
        # After each `fit`, weights are their averages.
        later = left(model, fit(model, numbers(ROWS, 7), epochs=1))
    if to is not None and (task_here() is None or task_here().is_chief):
        model.save(to)
    return found | {f"later/{k}": v for k, v in later.items()}


def backed_up(callbacks=()):
    """A model, and what training leaves of it but for logs."""
    # Averages change in the batch after a backup, in which workers have nothing to send.
    model, x = mlp(O.Adam(1e-2, gradient_accumulation_steps=4, use_ema=True, ema_momentum=0.9))
    # The first epoch's weights, which a job that resumes has from the backup.
    first = keras.callbacks.EarlyStopping("loss", mode="max", patience=9, restore_best_weights=True)
    fit(model, x, epochs=4, callbacks=[*callbacks[:1], first, *callbacks[1:]])
    return model, left(model)


def after_a_loss():
    """The state that a job which lost a worker has to end with."""
    return backed_up()[1]


class Places(L.Layer):
    """Adds rows for the places of tokens, two of which share one."""

    def build(self, shape):
        self.table = L.Embedding(3, shape[-1])

    def call(self, x):
        return x + self.table(keras.ops.arange(keras.ops.shape(x)[1]) // 2)


def accumulated(name, steps=3, part=6, rows=26):
    """Updates of several batches in a cluster, and of one of all of their rows in one process.

    An epoch of 26 rows ends with an update of two batches, one of 32 rows with three.
    """
    x = numbers(rows, 7)
    if name == "two_optimizers":
        model = made_of_two(x)
    elif name.startswith("embedding/"):
        model, x = embedding(OPTIMIZERS[name.removeprefix("embedding/")](), rows=rows)
    elif name == "places":
        tokens = np.random.RandomState(1).randint(0, 7, (rows, 4))
        layers = [L.Embedding(12, 4), Places(), L.Flatten(), L.Dense(3)]
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
        model, x = compiled(model, O.Adagrad(0.1)), tokens
    else:
        # Statistics would be those of each batch.
        layers = [L.Dense(8, activation="tanh"), L.Dense(4, activation="tanh"), L.Dense(3)]
        model = compiled(keras.Sequential([keras.Input((7,)), *layers]), OPTIMIZERS[name]())
    if name == "loss_scale":
        # Infinite gradients on one worker.
        x[3, 0] = np.inf
    with swapped(updates=flushed(steps)):
        size = part * (1 if tf.distribute.has_strategy() else steps)
        history = fit(model, x, batch_size=size)
    # A step of its own logs norms of its gradients.
    return left(model, history if name != "two_optimizers" else ())


def flushed(steps):
    if not tf.distribute.has_strategy():
        return None
    from keras_psplus.updates import Accumulate

    return Accumulate(steps, flush=True)


def digits(compression=None, bucket_bytes=None):
    """Accuracy on digits that training has not seen, weights of each worker, bytes of a step."""
    with np.load(DIGITS) as file:
        x, y = file["x"].astype("float32") / 16, file["y"].astype("int32")
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    with swapped(compression=compression, bucket_bytes=bucket_bytes):
        layers = [L.Dense(96, activation="relu"), L.Dense(10)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        compiled(model, O.Adam(5e-3), metrics=["accuracy"])
        before = wire_bytes()
        model.fit(x[597:], y[597:], batch_size=48, epochs=4, shuffle=False, verbose=0)
        wire = (wire_bytes() - before) / 100
        weights = {f"weights/{i}": value for i, value in enumerate(model.get_weights())}
        accuracy = model.evaluate(x[:597], y[:597], batch_size=199, verbose=0)[1]
    return weights | {"accuracy": accuracy, "wire": wire}


def wire_bytes():
    if not tf.distribute.has_strategy():
        return 0
    return tf.distribute.get_strategy().communication.wire_bytes


def state_and_bytes(name="adam"):
    """Training; bytes of a step, and the sizes of what this worker keeps of its optimizer."""
    model, x = of(name)
    if not tf.distribute.has_strategy():
        return left(model, fit(model, x))
    found = {f"own {what}": value for what, value in bytes_of_steps(model, x).items()}
    found |= left(model, found.pop("own history"))
    strategy = tf.distribute.get_strategy()
    if strategy.is_chief and strategy.engine.has_whole_weights:
        # Others need not do so as well.
        model.set_weights(model.get_weights())
    slots = model.optimizer.variables[2:]
    return found | {
        "own kept": [slot._value.part.shape.num_elements() for slot in slots],
        "own whole": [np.prod(slot.shape) for slot in slots],
    }


def bytes_of_table():
    found = bytes_of_steps(*embedding(O.SGD(0.05), tokens=1000))
    del found["history"]
    return found


def bytes_of_steps(model, x):
    communication, steps = tf.distribute.get_strategy().communication, EPOCHS * -(-ROWS // BATCH)
    wire, between = communication.wire_bytes, communication.between_groups_bytes
    history = fit(model, x)
    return {
        "history": history,
        "wire": (communication.wire_bytes - wire) / steps,
        "between": (communication.between_groups_bytes - between) / steps,
    }
