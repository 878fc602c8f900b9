"""Models that update in the ways of `updates=`: `test_updates.py` says what they must come to."""

import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf

from tests.support import parts

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


def loss_scale():
    return dense(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.3), initial_scale=2.0**8)
    )


def eagerly():
    return dense(keras.optimizers.Adam(0.02), run_eagerly=True)


def of(policy):
    """An update rule, of its class's name and arguments: plain Keras imports this as well."""
    from keras_psplus import updates

    name, arguments = policy
    return getattr(updates, name)(**arguments)


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
    options = {"epochs": epochs, "callbacks": list(callbacks), "shuffle": False, "verbose": 0}
    return model.fit(x, y, BATCH, **options)


def weights(name, model):
    return {f"{name}/{i}": weight for i, weight in enumerate(model.get_weights())}


# The model, the arguments of `Accumulate`, and whether batches are given one by one.
ACCUMULATED = {
    "optimizers": (everything_about_optimizers, {"steps": 3}, False),
    "flush": (everything_about_optimizers, {"steps": 3, "flush": True}, False),
    "places": (places, {"steps": 2}, False),
    "loss_scale": (loss_scale, {"steps": 3}, True),
    "eagerly": (eagerly, {"steps": 2}, False),
}


def accumulated(name):
    """Applies the gradients of several batches at once."""
    with parts.swapped(updates=of(("Accumulate", ACCUMULATED[name][1]))) as strategy:
        model = train_accumulated(strategy, name)
        found = {"own bytes": strategy.communication.logical_bytes}
        return model, found | {"updates": number_of_updates(model)}


def train_accumulated(strategy, name):
    build, _, by_batch = ACCUMULATED[name]
    model = build()
    if not by_batch:
        fit(model)
        return model
    x, y = data_of(name)
    for rows in EPOCHS * slices():
        model.train_on_batch(x[rows], y[rows])
    strategy.finish_updates(model.optimizer)
    return model


def number_of_updates(model):
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return int(optimizer.iterations.numpy())


def on_larger_batches(name):
    """Trains on the batches whose gradients `accumulated` applies at once."""
    build, _, by_batch = ACCUMULATED[name]
    model, (x, y) = build(), data_of(name)
    groups = whole_batches(name)
    for rows in groups:
        model.train_on_batch(x[rows], y[rows])
    if not by_batch:
        model.optimizer.finalize_variable_values(model.trainable_weights)
    return model, {"updates": number_of_updates(model), "batches": len(groups)}


def whole_batches(name):
    """The rows of each update."""
    _, arguments, by_batch = ACCUMULATED[name]
    groups, waiting = [], []
    for _ in range(EPOCHS):
        for rows in slices():
            waiting += [rows]
            if len(waiting) == arguments["steps"]:
                groups, waiting = [*groups, waiting], []
        if arguments.get("flush") and waiting:
            groups, waiting = [*groups, waiting], []
    if by_batch and waiting:
        groups += [waiting]
    return [np.concatenate([np.arange(r.start, r.stop) for r in group]) for group in groups]


def outer_adam():
    return keras.optimizers.Adam(0.05)


# The policy and the optimizer.
LOCAL = {
    "every step": (("LocalSGD", {"every": 1}), "sgd"),
    "post-local": (("LocalSGD", {"every": 3, "start_step": 6}), "ema"),
    "slots": (("LocalSGD", {"every": 3, "average_slots": True}), "momentum"),
    "diloco": (("DiLoCo", {"every": 3, "alpha": 0.25}), "momentum"),
    "outer adam": (
        ("DiLoCo", {"every": 3, "outer_optimizer": outer_adam}),
        "sgd",
    ),
    "fragments": (("DiLoCo", {"every": 4, "fragments": 2, "overlap_steps": 1}), "momentum"),
    "overlap": (("DiLoCo", {"every": 8, "overlap_steps": 5, "alpha": 0.0}), "sgd"),
}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.3),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "ema": lambda: keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.8),
}


def local(name):
    """Steps of each worker alone."""
    policy, optimizer = LOCAL[name]
    with parts.swapped(updates=of(policy)) as strategy:
        model = dense(OPTIMIZERS[optimizer]())
        losses = fit(model).history["loss"]
        sent = strategy.communication.logical_bytes
        return model, {"losses": losses, "updates": number_of_updates(model), "sent": sent}


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


def meetings(folder):
    """Looks at weights that all workers look at together, and are the same then."""
    # It sees the weights of the third batch after they are saved.
    path = pathlib.Path(folder, "third-batch.weights.h5")
    save = keras.callbacks.ModelCheckpoint(path, save_freq=3, save_weights_only=True)
    meeting = Meeting()
    with parts.swapped(updates=of(("LocalSGD", {"every": 100}))):
        # In a scope, where Keras makes an optimizer to save one, and only the chief saves.
        fit(dense("sgd"), 1, [save, meeting])
    apart, evaluated, predicted, together = meeting.seen
    found = {f"own apart/{i}": weight for i, weight in enumerate(apart)}
    found |= {f"together/{i}": weight for i, weight in enumerate(together)}
    found |= {f"saved/{i}": weight for i, weight in enumerate(meeting.saved)}
    return found | {"evaluated": evaluated[0], "predicted": predicted[0]}


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


def optimizers_of_parts():
    """Optimizers that are no attributes of the model."""
    with parts.swapped(updates=of(("LocalSGD", {"every": 3}))):
        model = OfParts(keras.optimizers.SGD(0.1))
        model.compile()
        fit(model)
        return {str(i): w.astype("float32") for i, w in enumerate(model.get_weights())}


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
    "two optimizers": (("Accumulate", {"steps": 1}), None, two_optimizers),
    "accumulate": (("Accumulate", {"steps": 3}), "int8", embedding),
    "diloco": (("DiLoCo", {"every": 4, "fragments": 2, "overlap_steps": 1}), "int8", with_dropout),
}


def interrupted(name):
    """Interrupted and started again, and as a whole."""
    policy, compressor, build = RESUMED[name]

    def train(*callbacks):
        keras.utils.set_random_seed(1)
        swapped = parts.swapped(updates=of(policy), compression=compressor, bucket_bytes=3000)
        with swapped as strategy:
            model = build()
            fit(model, 4, callbacks)
            sent = strategy.communication
            return model, [sent.logical_bytes, sent.compressed_bytes]

    found = weights("resumed", parts.resumed(train, 1, save_freq=3)[0])
    with tempfile.TemporaryDirectory() as folder:
        # Workers that step alone average their weights for a backup.
        backup = keras.callbacks.BackupAndRestore(folder, save_freq=3)
        model, sent = train(*([backup] if name == "diloco" else []))
    return found | weights("whole", model) | {"own bytes": sent}


def by_hand():
    """Loads a state before the first step, which makes the outer optimizer and residuals."""

    def build():
        model = dense(keras.optimizers.SGD(0.1, momentum=0.9))
        model.optimizer.build(model.trainable_variables)
        return model, [*model.variables, *model.optimizer.variables]

    options = {"updates": of(("DiLoCo", {"every": 2})), "compression": "int8"}
    with parts.swapped(**options, bucket_bytes=3000) as strategy:
        model, variables = build()
        fit(model, 2)
        strategy.finish_updates(model.optimizer)
        values, state = [v.numpy() for v in variables], strategy.state_dict(model.optimizer)
        fit(model, 2)
        found = weights("whole", model)
    with parts.swapped(**options, bucket_bytes=3000) as strategy:
        keras.utils.set_random_seed(1)
        model, variables = build()
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        strategy.load_state_dict(model.optimizer, state)
        fit(model, 2)
        return found | weights("resumed", model)
