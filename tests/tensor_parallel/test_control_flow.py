"""Layers with weights in parts inside of loops; unseeded random numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.cluster import equals_one_process, run
from tests.support.jobs import run_in_processes

pytestmark = pytest.mark.processes


class Around(keras.layers.Layer):
    """A layer that calls another one in a loop."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4, "tanh", kernel_initializer=keras.initializers.Ones())

    def build(self, shape):
        self.dense.build(shape)

    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        loop = tf.while_loop(
            lambda i, y: i < 2, lambda i, y: (i + 1, self.dense(y)), (tf.constant(0), x)
        )
        return loop[1]


def data():
    x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
    return x, x[:, :1]


def model(*layers, **kwargs):
    ends = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)
    one = keras.Sequential([keras.Input((3,)), ends[0], *layers, ends[1]])
    one.compile(keras.optimizers.Adam(0.05), "mse", **kwargs)
    return one


def around():
    one = model(Around())
    history = one.fit(*data(), batch_size=6, epochs=2, shuffle=False, verbose=0).history
    return one, history | {"predicted": one.predict(data()[0], verbose=0)}


def noise():
    import keras
    import numpy as np
    import tensorflow as tf

    import keras_psplus as psp

    class Noise(keras.layers.Layer):
        def call(self, x):
            return x + tf.random.normal(tf.shape(x))

    strategy = psp.ModelParallelStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Noise(), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x = np.ones((12, 3), "float32")
    model.fit(x, x[:, :1], batch_size=6, epochs=3, verbose=0)
    print([weight.tolist() for weight in model.get_weights()])


class Jacobian(keras.Sequential):
    """Steps by gradients of each row, as differentially private training takes them."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(tf.square(self(x, training=True) - y), axis=1)
        rows = tape.jacobian(losses, self.trainable_weights)
        self.optimizer.apply([tf.reduce_mean(g, 0) for g in rows], self.trainable_weights)
        return {"loss": tf.reduce_mean(losses)}


def jacobian():
    one = Jacobian([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    one.compile(keras.optimizers.SGD(0.1))
    with pytest.raises(NotImplementedError) as error:
        one.fit(*data(), batch_size=6, verbose=0)
    return {"message": str(error.value)}


# Branches and other loops are in tests/matrix.
def test_layers_in_loops_equal_one_process():
    equals_one_process("tp2", around)


@pytest.mark.extended
def test_random_numbers_without_a_seed_are_those_of_all_workers():
    logs = run_in_processes(noise, workers=2, timeout=120).logs
    assert len({log.splitlines()[-1] for log in logs.values()}) == 1


def test_gradients_of_rows_are_refused():
    message = str(run("tp2", jacobian, may_show_errors=True).first["message"])
    assert "experimental_use_pfor=False" in message and "Received: " in message
