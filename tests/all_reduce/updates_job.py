"""What every worker does in `test_updates.py`; results go to one file for each worker."""

import argparse
import json
import os
import pathlib

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus
from keras_psplus import cluster, updates
from keras_psplus.all_reduce.step.updating import MirroredUpdates
from tests.all_reduce.job_parts import Interrupt, Interrupted, compress

ROWS, BATCH, EPOCHS = 37, 10, 3


def problem(rows=ROWS):
    """Batches of 10, 10, 10 and 7 rows."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 20, size=(rows, 6)).astype("int32")
    return x, rng.normal(size=(rows, 3)).astype("float32")


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(keras.ops.cast(x, "float32") / 20.0)

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        variables = self.trainable_variables
        self.stepping().apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}

    def stepping(self):
        return self.optimizer


def dense(optimizer, **kwargs):
    layers = [
        keras.layers.Rescaling(0.05),
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.Dense(3),
    ]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(optimizer, "mse", **kwargs)
    return model


def everything_about_optimizers():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.7)
    return dense(
        keras.optimizers.SGD(
            schedule,
            momentum=0.9,
            global_clipnorm=0.3,
            weight_decay=0.01,
            use_ema=True,
            ema_momentum=0.8,
            ema_overwrite_frequency=2,
        )
    )


def embedding():
    layers = [keras.layers.Embedding(20, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9), "mse", steps_per_execution=3)
    return model


class Places(keras.layers.Layer):
    """Adds rows for the places of tokens, two of which share one."""

    def build(self, shape):
        self.table = keras.layers.Embedding(3, shape[-1])

    def call(self, x):
        return x + self.table(keras.ops.arange(keras.ops.shape(x)[1]) // 2)


def places():
    layers = [keras.layers.Embedding(20, 4), Places(), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers, keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model


def own_step():
    model = OwnStep()
    model(np.zeros((1, 6)))
    model.compile(keras.optimizers.AdamW(0.02))
    return model


def loss_scale():
    return dense(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.3), initial_scale=2.0**8)
    )


def eagerly():
    return dense(keras.optimizers.Adam(0.02), run_eagerly=True)


# The model, the policy, and whether batches are given one by one.
ACCUMULATED = {
    "optimizers": (everything_about_optimizers, updates.Accumulate(3), False),
    "flush": (everything_about_optimizers, updates.Accumulate(3, flush=True), False),
    "embedding": (embedding, updates.Accumulate(2), False),
    "places": (places, updates.Accumulate(2), False),
    "own_step": (own_step, updates.Accumulate(2), False),
    "loss_scale": (loss_scale, updates.Accumulate(3), True),
    "eagerly": (eagerly, updates.Accumulate(2), False),
}


def data_of(name):
    """The data of a case; with a loss scale, one worker's part of a batch overflows."""
    x, y = problem()
    if name == "loss_scale":
        y[12] = np.inf
    return x, y


def slices(rows=ROWS):
    return [slice(first, min(first + BATCH, rows)) for first in range(0, rows, BATCH)]


def fit(model, epochs=EPOCHS, callbacks=()):
    x, y = problem()
    return model.fit(
        x, y, BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)
    )


def accumulated(make, out, names):
    for name in names:
        build, policy, by_batch = ACCUMULATED[name]
        strategy = make(policy)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = build()
        if by_batch:
            x, y = data_of(name)
            for _ in range(EPOCHS):
                for rows in slices():
                    model.train_on_batch(x[rows], y[rows])
            strategy.finish_updates(model.optimizer)
        else:
            fit(model)
        optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        out[f"accumulated {name}"] = {
            "weights": model.get_weights(),
            "numbers": [int(optimizer.iterations.numpy()), strategy.communication.logical_bytes],
        }


# The policy and the optimizer.
LOCAL = {
    "every step": (updates.LocalSGD(1), "sgd"),
    "post-local": (updates.LocalSGD(3, start_step=6), "ema"),
    "slots": (updates.LocalSGD(3, average_slots=True), "momentum"),
    "diloco": (updates.DiLoCo(3, alpha=0.25), "momentum"),
    "outer adam": (updates.DiLoCo(3, lambda: keras.optimizers.Adam(0.05)), "sgd"),
    "fragments": (updates.DiLoCo(4, fragments=2, overlap_steps=1), "momentum"),
    "overlap": (updates.DiLoCo(8, overlap_steps=5, alpha=0.0), "sgd"),
}
# Of which one is also trained by a process that is alone, by its number of devices.
ALONE = {1: "diloco", 2: "fragments"}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.3),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "ema": lambda: keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.8),
}


def local(make, out, names):
    for name in names:
        policy, optimizer = LOCAL[name]
        strategy = make(policy)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = dense(OPTIMIZERS[optimizer]())
        out[f"local {name}"] = {
            "losses": fit(model).history["loss"],
            "weights": model.get_weights(),
            "numbers": [
                int(model.optimizer.iterations.numpy()),
                strategy.communication.logical_bytes,
            ],
        }


class Meeting(keras.callbacks.Callback):
    """Looks at weights in the middle of an epoch."""

    def __init__(self):
        super().__init__()
        self.seen, self.saved = [], None

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            x, y = problem()
            self.seen.append(self.model.get_weights())
            self.seen.append([np.asarray(self.model.evaluate(x, y, verbose=0))])
            self.seen.append([self.model.predict(x, verbose=0)])
            self.seen.append(self.model.get_weights())
        if batch == 2:
            self.saved = self.model.get_weights()


def meetings(make, out, folder):
    """All workers that look at the weights together see the same ones."""
    strategy = make(updates.LocalSGD(100))
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = dense("sgd")
    path = os.path.join(folder, "third-batch.weights.h5")
    save = keras.callbacks.ModelCheckpoint(path, save_freq=3, save_weights_only=True)
    meeting = Meeting()
    # It sees the weights of the third batch after they are saved.
    # In a scope, where Keras makes an optimizer to save one, and only the chief saves.
    with strategy.scope():
        fit(model, 1, [save, meeting])
    apart, evaluated, predicted, together = meeting.seen
    out["apart"] = {"weights": apart}
    out["together"] = {"weights": [*together, *evaluated, *predicted]}
    out["saved"] = {"weights": meeting.saved}


class OfParts(keras.Model):
    """Trains one part with that part's optimizer, and one with an optimizer kept elsewhere."""

    def __init__(self, elsewhere):
        super().__init__()
        self.inner = dense("sgd")
        self.outer = keras.layers.Dense(3, dtype="bfloat16")
        self.take_step = elsewhere.apply

    def call(self, x):
        return keras.ops.cast(self.outer(self.inner(x)), "float32")

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape(persistent=True) as tape:
            loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        for apply, part in ((self.inner.optimizer.apply, self.inner), (self.take_step, self.outer)):
            apply(tape.gradient(loss, part.trainable_variables), part.trainable_variables)
        return {"loss": loss}


def parts(make, out):
    """Optimizers that are no attributes of the model."""
    strategy = make(updates.LocalSGD(3))
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = OfParts(keras.optimizers.SGD(0.1))
        model.compile()
    fit(model)
    out["parts"] = {"weights": [weight.astype("float32") for weight in model.get_weights()]}


def with_dropout():
    layers = [keras.layers.Dense(8), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,)), keras.layers.Rescaling(0.05), *layers])
    model.compile(keras.optimizers.Adam(0.05), "mse")
    return model


class TwoOptimizers(OwnStep):
    """Trains with an optimizer that `compile` was not given."""

    def compile(self, second):
        super().compile()
        self.second = second

    def stepping(self):
        return self.second


def two_optimizers():
    model = TwoOptimizers()
    model(np.zeros((1, 6)))
    model.compile(keras.optimizers.Adam(0.02))
    model.second.build(model.trainable_variables)
    return model


# The policy, the compressor and the model.
RESUMED = {
    "two optimizers": (updates.Accumulate(1), None, two_optimizers),
    "accumulate": (updates.Accumulate(3), "int8", embedding),
    "diloco": (updates.DiLoCo(4, fragments=2, overlap_steps=1), "int8", with_dropout),
}


def resumed(make, out, folder, cases):
    """Interrupted and started again, it ends as if nothing had happened."""
    for name, (policy, compressor, build) in cases.items():

        def train(*callbacks, policy=policy, compressor=compressor, build=build):
            strategy = make(policy, compressor)
            keras.utils.set_random_seed(1)
            with strategy.scope():
                model = build()
            fit(model, 4, callbacks)
            sent = strategy.communication
            return {
                "weights": model.get_weights(),
                "numbers": [sent.logical_bytes, sent.compressed_bytes],
            }

        # Each worker has a disk of its own.
        disk = os.path.join(folder, f"{name}-{os.getpid()}")
        try:
            train(keras.callbacks.BackupAndRestore(disk, save_freq=3), Interrupt(1))
        except Interrupted:
            pass
        out[f"resumed {name}"] = train(keras.callbacks.BackupAndRestore(disk, save_freq=3))
        # Workers that step alone average their weights for a backup.
        whole = keras.callbacks.BackupAndRestore(f"{disk}-whole", save_freq=3)
        out[f"whole {name}"] = train(*([whole] if policy.local else []))


def by_hand(make, out):
    """A state is loaded before the first step, which makes the outer optimizer and residuals."""

    def build():
        strategy = make(updates.DiLoCo(2), "int8")
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = dense(keras.optimizers.SGD(0.1, momentum=0.9))
            model.optimizer.build(model.trainable_variables)
        return strategy, model, [*model.variables, *model.optimizer.variables]

    strategy, model, variables = build()
    fit(model, 2)
    strategy.finish_updates(model.optimizer)
    values, state = [v.numpy() for v in variables], strategy.state_dict(model.optimizer)
    fit(model, 2)
    out["whole by hand"] = {"weights": model.get_weights()}
    strategy, model, variables = build()
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    strategy.load_state_dict(model.optimizer, state)
    fit(model, 2)
    out["resumed by hand"] = {"weights": model.get_weights()}


CASES = [
    *(f"accumulated {name}" for name in ACCUMULATED),
    *(f"local {name}" for name in LOCAL),
    *("meetings", "parts", "by_hand"),
    *(f"resumed {name}" for name in RESUMED),
]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--devices", type=int, default=0, help="of a process that is alone")
    parser.add_argument("cases", nargs="*", help="of a worker")
    options = parser.parse_args()
    if options.devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * options.devices
        )
    task = cluster.read_task_config()
    index = task.task_index if task else 0
    strategy = keras_psplus.MultiWorkerMirroredStrategy(updates=updates.Accumulate(1))

    def make(policy, compressor=None):
        # A process has one strategy; each case gets the parts of it that send anew.
        strategy._updates = policy
        strategy.extended.updating = MirroredUpdates(policy, strategy)
        compress(strategy, compressor)
        return strategy

    out = {}
    if options.devices:
        accumulated(make, out, ["optimizers"])
        local(make, out, [ALONE[options.devices]])
    else:
        # Whatever the order of the arguments.
        for case in [case for case in CASES if case in options.cases]:
            kind, _, name = case.partition(" ")
            if kind == "accumulated":
                accumulated(make, out, [name])
            elif kind == "local":
                local(make, out, [name])
            elif kind == "meetings":
                meetings(make, out, options.out)
            elif kind == "parts":
                parts(make, out)
            elif kind == "by_hand":
                by_hand(make, out)
            else:
                resumed(make, out, options.out, {name: RESUMED[name]})
    arrays = {
        f"{name}/{i}": weight
        for name, got in out.items()
        for i, weight in enumerate(got.get("weights", ()))
    }
    np.savez(os.path.join(options.out, f"worker-{index}.npz"), **arrays)
    numbers = {name: got["numbers"] for name, got in out.items() if "numbers" in got}
    numbers |= {f"losses of {name}": got["losses"] for name, got in out.items() if "losses" in got}
    pathlib.Path(options.out, f"worker-{index}.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    main()
