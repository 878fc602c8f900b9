"""Gradients outside of `fit`: of inputs and weights, and steps that a script takes itself."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.cluster import equals_one_process, makes_scope, run

pytestmark = pytest.mark.processes


def model():
    one = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, "tanh", kernel_initializer=keras.initializers.GlorotUniform(1)),
            keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(2)),
        ]
    )
    one.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return one


def rows():
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    return tf.constant(x), tf.constant(x[:, :2])


@makes_scope
def of_inputs_and_weights(scope):
    """As in Grad-CAM, and in a callback that notes norms of gradients."""
    with scope():
        one, (x, y) = model(), rows()
    one.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        loss = tf.reduce_mean(tf.square(one(x, training=True) - y))
    weights = tape.gradient(loss, one.trainable_weights)
    return one, {
        "inputs": tape.gradient(loss, x),
        "norm": tf.linalg.global_norm(weights),
        **{f"weight/{i}": gradient for i, gradient in enumerate(weights)},
    }


@makes_scope
def eager_step(scope):
    """All workers take a step with the same rows."""
    with scope():
        one, (x, y) = model(), rows()
    one.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(one(x, training=True) - y))
    one.optimizer.apply(tape.gradient(loss, one.trainable_weights), one.trainable_weights)
    return one, {"loss": loss}


@makes_scope
def by_the_chief_alone(scope):
    """Gradients, and a function as for generation, while the other worker does something else."""
    with scope():
        one, (x, _) = model(), rows()
    if one.distribute_strategy.task.name != "worker-0":
        return {}
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(one(x))
    norm = tf.linalg.global_norm(tape.gradient(loss, one.trainable_weights))
    with tf.GradientTape() as tape:
        around = tf.reduce_sum(tf.function(one)(x))
    of_function = tf.linalg.global_norm(tape.gradient(around, one.trainable_weights))
    return {"norm": norm, "loss": loss, "function": around, "norm of function": of_function}


# Under the other strategies: tests/matrix.
def test_gradients_of_inputs_and_weights():
    equals_one_process("tp2", of_inputs_and_weights)


def test_a_step_of_a_script():
    """By workers that train one replica: those of several sum what each has computed."""
    equals_one_process("tp2", eager_step)


def test_a_worker_computes_alone():
    found = run("all2", by_the_chief_alone, same=False)["worker-0"]
    np.testing.assert_allclose(found["function"], found["loss"], rtol=1e-5)
    np.testing.assert_allclose(found["norm of function"], found["norm"], rtol=1e-5)
    assert found["norm"] > 0
