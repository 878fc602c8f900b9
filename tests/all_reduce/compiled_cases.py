"""Models whose calls are compiled: `test_compiled.py` says what they must come to."""

import contextlib
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers


def dense():
    """Masks, losses that a layer adds, weights' losses, dropout that drops nothing."""
    tokens = keras.Input((6,), dtype="int32")
    h = layers.Embedding(20, 8, mask_zero=True)(tokens)
    h = layers.MultiHeadAttention(2, 4)(h, h)
    h = layers.GlobalAveragePooling1D()(layers.Dropout(0.0)(h))
    h = layers.Dense(8, "relu", kernel_regularizer="l2", activity_regularizer="l1")(h)
    return keras.Model(tokens, {"a": layers.Dense(3)(h), "b": layers.Dense(2)(h)})


class Either(layers.Layer):
    """Calls one of two layers, by what it is given."""

    def build(self, shape):
        self.some, self.others = layers.Dense(8, "tanh"), layers.Dense(8, "relu")
        self.some.build(shape), self.others.build(shape)

    def call(self, x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: self.some(x), lambda: self.others(x))

    def compute_output_shape(self, shape):
        return (*shape[:-1], 8)


class Penalty(layers.Layer):
    """Adds a loss in training alone."""

    def call(self, x, training=None):
        if training:
            self.add_loss(0.1 * keras.ops.mean(x**2))
        return x


def branching(chooses=True):
    """A branch between two layers, and a loss that evaluation has not."""
    inputs = keras.Input((5,))
    h = layers.Dense(8, "tanh")(inputs)
    h = Penalty()(Either()(h) if chooses else layers.Dense(8)(h))
    return keras.Model(inputs, {"a": layers.Dense(3)(h), "b": layers.Dense(2)(h)})


def penalised():
    """A model that is compiled as a whole."""
    return branching(chooses=False)


class Pair(keras.Model):
    """A model of two models, which are called by its step; it has no call itself."""

    def __init__(self):
        super().__init__()
        self.first = keras.Sequential([keras.Input((5,)), layers.Dense(7, "tanh")])
        self.second = keras.Sequential([keras.Input((7,)), layers.Dense(1)])
        self.built = True

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self.second(self.first(x)) - y) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


def data_of(name, rows=8):
    random = np.random.default_rng(0)
    if name == "Pair":
        return random.normal(size=(rows, 5)).astype("f"), random.normal(size=(rows, 1)).astype("f")
    x = random.integers(0, 20, (rows, 6))
    if name in ("branching", "penalised"):
        x = random.normal(size=(rows, 5)).astype("f")
    return x, {"a": random.integers(0, 3, rows), "b": random.normal(size=(rows, 2)).astype("f")}


def trained(name):
    """Trains a model, by the name of its function, and counts the calls that are compiled."""
    counts = []
    x, y = data_of(name)
    # Adam would scale up what is left of gradients that are zero, as of an attention's biases.
    model, optimizer = globals()[name](), keras.optimizers.SGD(0.1, 0.9)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"
    arguments = {"loss": dict(zip("ab", losses)), "metrics": {"a": ["accuracy"]}}
    with counting(counts, by_default=name == "Pair"):
        asks = tf.distribute.has_strategy() and name != "Pair"
        arguments = {} if name == "Pair" else arguments
        model.compile(optimizer, jit_compile=True if asks else "auto", **arguments)
        validated = {"validation_data": (x, y)} if name in ("branching", "penalised") else {}
        options = {"epochs": 2, "shuffle": False, "verbose": 0} | validated
        logs = dict(model.fit(x, y, 8, **options).history)
    return model, logs | ({"calls": counts[-1]} if counts else {})


@contextlib.contextmanager
def counting(counts, by_default):
    """Has models be compiled by default, as on GPUs, or not."""
    if not tf.distribute.has_strategy():
        yield
        return
    from keras_psplus.all_reduce.engine import AllReduceEngine
    from keras_psplus.core.graph.compiled_calls import CompiledCalls

    check = CompiledCalls.check

    def note(self):
        counts.append(self.count)
        check(self)

    with (
        mock.patch.object(CompiledCalls, "check", note),
        mock.patch.object(AllReduceEngine, "compiles_by_default", by_default),
    ):
        yield


def refused():
    """A model whose only call is a loop."""
    model = keras.Sequential([keras.Input((4,)), layers.Reshape((4, 1)), layers.SimpleRNN(1)])
    model.compile("sgd", "mse", jit_compile=True)
    try:
        model.fit(np.ones((8, 4)), np.ones((8, 1)), 4, verbose=0)
    except ValueError as error:
        return {"error": str(error)}
    return {}
