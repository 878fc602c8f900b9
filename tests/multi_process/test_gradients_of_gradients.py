"""Gradients of what a step has computed of gradients, as of a penalty of their norm."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.cluster import equals_one_process, makes_scope, run
from tests.support.parts import swapped

pytestmark = pytest.mark.processes
WORDS = 5


class Twice(keras.Model):
    """Takes gradients of gradients, in the way that its kind says."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.rows = keras.layers.Embedding(WORDS, 3, keras.initializers.RandomUniform(seed=1))
        self.dense = keras.layers.Dense(
            2, "tanh", kernel_initializer=keras.initializers.GlorotUniform(2)
        )

    def build(self, shape):
        self.rows.build(shape)
        self.dense.build((None, 3))
        self.built = True

    def call(self, words):
        return self.dense(keras.ops.sum(self.rows(words), axis=1))

    def train_step(self, data):
        words, y = data
        weights, is_of_dense = self.trainable_variables, "rows" not in self.kind
        trained = self.dense.trainable_variables if is_of_dense else weights
        with tf.GradientTape(persistent=True) as outer:
            with tf.GradientTape() as inner:
                loss = self.compute_loss(words, y, self(words, training=True))
            first = inner.gradient(loss, trained)
            total = loss
            if self.kind.startswith("norm"):
                # Of a table's rows as the tape has them, some come twice.
                form = tf.convert_to_tensor if self.kind == "norm of joined rows" else values
                total += 0.5 * sum(tf.reduce_sum(tf.square(form(one))) for one in first)
            elif self.kind == "inner step":
                kernel, bias = (v - 0.3 * one for v, one in zip(trained, first))
                inputs = keras.ops.sum(self.rows(words), axis=1)
                predictions = tf.tanh(tf.matmul(inputs, kernel) + bias)
                total = tf.reduce_mean(tf.square(predictions - y))
        if self.kind == "along a direction":
            seeds = [tf.ones_like(one) for one in first]
            second = outer.gradient(first, weights, output_gradients=seeds)
            plain = {id(v): one for v, one in zip(trained, first)}
            second = [
                0.1 * tf.convert_to_tensor(one) + plain.get(id(v), 0.0)
                for v, one in zip(weights, second)
            ]
        elif self.kind == "forward":
            primals, tangents = [v.value for v in trained], [tf.ones_like(v) for v in trained]
            with tf.autodiff.ForwardAccumulator(primals, tangents) as along:
                with tf.GradientTape() as inner:
                    loss = self.compute_loss(words, y, self(words, training=True))
                first = inner.gradient(loss, trained)
            weights, second = trained, [one + 0.1 * along.jvp(one) for one in first]
        elif self.kind == "jacobian":
            second = outer.jacobian(first[0], weights, experimental_use_pfor=False)
        else:
            second = outer.gradient(total, weights)
        self.optimizer.apply(second, weights)
        return {"loss": loss, "norm": tf.linalg.global_norm(second)}


def values(gradient):
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


@makes_scope
def twice(scope, kind, eagerly=False):
    """The last of three batches has five rows."""
    random = np.random.default_rng(0)
    words, y = random.integers(0, WORDS, (21, 4)), random.normal(size=(21, 2)).astype("float32")
    with scope():
        model = Twice(kind)
        model.build((None, 4))
        model.compile(keras.optimizers.SGD(0.5), "mse", run_eagerly=eagerly)
    history = model.fit(words, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return model, {name: np.array(one) for name, one in history.items()}


@pytest.mark.parametrize(
    "layout, kind",
    [
        ("ar3", "norm"),
        ("ar3", "norm of rows"),
        ("ar3", "forward"),
        ("opt2", "along a direction"),
        ("all2", "inner step"),
        pytest.param("tp4", "norm of rows", marks=pytest.mark.extended),
        pytest.param("hybrid22", "norm of joined rows", marks=pytest.mark.extended),
        pytest.param("hosts", "inner step", marks=pytest.mark.extended),
        pytest.param("ar3", "along a direction", marks=pytest.mark.extended),
        pytest.param("ar3", "inner step", marks=pytest.mark.extended),
    ],
)
def test_gradients_of_gradients(layout, kind):
    equals_one_process(layout, twice, kind=kind)


@makes_scope
def refused(scope):
    """Eagerly, compressed sums are made after the gradient of them; and in loops."""
    x, y = np.zeros((8, 4), int), np.ones((8, 2))
    for kind, compression, message in (
        ("norm", "int8", "Use `run_eagerly=False`. Received: 2 gradient"),
        ("jacobian", None, "let Python turn.*Received: gradients of those of .*kernel"),
    ):
        with scope(), swapped(compression=compression):
            model = Twice(kind)
            model.build((None, 4))
            model.compile(keras.optimizers.SGD(0.5), "mse", run_eagerly=kind == "norm")
            with pytest.raises(ValueError, match=message):
                model.fit(x, y, batch_size=8, verbose=0)
    return {}


def test_steps_in_which_gradients_cannot_go_back_are_refused():
    run("devices2", refused)


@pytest.mark.parametrize("kind", ["norm of rows", "along a direction"])
def test_eager_steps(kind):
    equals_one_process("devices2", twice, kind=kind, eagerly=True)
