"""Gradients outside of `fit`: of inputs and weights, and steps that a script takes itself."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.cluster import equals_one_process, makes_scope, run
from tests.support.late import LateRate, after

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
def steps(scope, in_function, name="adam", overflows=False):
    """All workers take steps with the same rows, the second one of them each time later."""
    with scope():
        one, (x, y) = model(), rows()
        one.compile(optimizer(name), "mse")
    one.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    strategy = one.distribute_strategy
    task = getattr(getattr(strategy, "task", None), "name", "")
    workers = strategy.num_replicas_in_sync if task.startswith("worker") else 1
    is_late = task == "worker-1"
    first, last = one.layers
    factor = tf.Variable(float("inf") if overflows and is_late else 1.0)

    def step():
        with tf.GradientTape() as tape:
            hidden = after(0.2 if is_late else 0.0, first(x))
            loss = tf.reduce_mean(tf.square(last(hidden) - y))
            scaled = one.optimizer.scale_loss(loss / workers) * factor
        one.optimizer.apply(tape.gradient(scaled, one.trainable_weights), one.trainable_weights)
        factor.assign(1.0)
        return loss

    call = tf.function(lambda: [step(), step()]) if in_function else lambda: [step(), step()]
    return one, {"losses": [call(), call()], "slot": one.optimizer.variables[-1]}


@makes_scope
def reads_between_steps(scope, name):
    """Weights and slots after each step of `strategy.run`, whose updates one worker makes later."""
    with scope():
        one, (x, y) = model(), rows()
        strategy = tf.distribute.get_strategy()
        task = getattr(getattr(strategy, "task", None), "name", "")
        rate = LateRate(0.2 if task == "worker-1" else 0.0)
        kind = keras.optimizers.Muon if name == "muon" else keras.optimizers.SGD
        by = kind(rate, momentum=0.9)
        by.build(one.trainable_variables)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
        data = strategy.experimental_distribute_dataset(data) if task else data

    @tf.function
    def step(batch):
        return strategy.run(replica, batch) if task else replica(*batch)

    def replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(one(x, training=True) - y)) / 8
        by.apply(tape.gradient(loss, one.trainable_weights), one.trainable_weights)

    found = {}
    for place, batch in enumerate(data):
        step(batch)
        for number, variable in enumerate([*one.weights, *by.variables]):
            found[f"{place}/{number}"] = variable.numpy()
    return found


def optimizer(name):
    """Of those whose ways with shares differ."""
    if name == "accumulated":
        return keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    if name == "scaled":
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    if name == "muon":
        return keras.optimizers.Muon(0.01)
    if name == "plain":
        return keras.optimizers.SGD(0.1, momentum=0.9)
    return keras.optimizers.Adam(0.01, global_clipnorm=0.1, weight_decay=0.01, use_ema=True)


@makes_scope
def refused_step(scope):
    with scope():
        one, (x, y) = model(), rows()
    one.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(one(x) - y))
    gradients = tape.gradient(loss, one.trainable_weights)
    with pytest.raises(RuntimeError, match="strategy.run.*Received: .* of 4 replicas, 2 on this"):
        one.optimizer.apply(gradients, one.trainable_weights)
    return {}


@makes_scope
def steps_that_nobody_would_sum(scope):
    """By an optimizer that was made outside of the scope, and in the scope."""
    with scope():
        one, (x, y) = model(), rows()
    one.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    weights, by = one.trainable_weights, keras.optimizers.SGD(0.1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(one(x) - y))
    gradients, before = tape.gradient(loss, weights), one.get_weights()
    with pytest.raises(ValueError, match=f"'{by.name}' was made outside the strategy's scope"):
        by.apply(gradients, weights)
    with scope(), pytest.raises(ValueError, match="takes no step in `strategy.scope.*Received"):
        one.optimizer.apply(gradients, weights)
    assert all(map(np.array_equal, one.get_weights(), before))
    return {}


@makes_scope
def steps_in_float8(scope):
    """Each worker has rows of its own, and a function: Keras takes no such step eagerly."""
    with scope():
        one, (x, y) = model(), rows()
        one.quantize("float8")
        one.compile(keras.optimizers.SGD(0.1), "mse")
    one.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    strategy = one.distribute_strategy
    workers, task = strategy.num_replicas_in_sync, getattr(strategy, "task", None)
    own = slice(int(task.name[-1]) if task else 0, None, workers)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(one(x[own], training=True) - y[own])) / workers
        one.optimizer.apply(tape.gradient(loss, one.trainable_weights), one.trainable_weights)

    step()
    step()
    scales = [v for v in one.trainable_weights if v.overwrite_with_gradient]
    return {v.path: v.numpy() for v in scales}


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


# Adam under the other strategies: tests/matrix.
@pytest.mark.parametrize(
    "layout, name, in_function",
    [
        ("tp2", "plain", False),
        ("tp2", "accumulated", True),
        ("opt2", "adam", False),
        ("all2", "muon", False),
        ("devices2", "scaled", True),
    ],
)
def test_steps_of_a_script(layout, name, in_function):
    equals_one_process(layout, steps, name=name, in_function=in_function)


@pytest.mark.parametrize("layout", ["all2", "tp2"])
def test_reads_between_steps_of_a_loop(layout):
    equals_one_process(layout, reads_between_steps, name="sgd")


def test_an_overflow_on_one_worker_skips_a_step_of_a_script():
    found = run("all2", steps, name="scaled", in_function=False, overflows=True)
    first, second, *_ = np.ravel(found.first["losses"])
    assert first == second


@pytest.mark.parametrize("layout", ["all2", "devices2"])
def test_steps_that_nobody_would_sum_are_refused(layout):
    run(layout, steps_that_nobody_would_sum)


@pytest.mark.extended  # Each in a cluster of its own.
@pytest.mark.parametrize("layout", ["stages2", "async_sharded", "sync_threads", "hybrid1"])
def test_such_steps_are_refused_by_all(layout):
    run(layout, steps_that_nobody_would_sum)


def test_steps_in_float8():
    equals_one_process("opt2", steps_in_float8, tolerance=1e-3)


def test_several_replicas_on_several_workers_are_refused():
    run("ar2x2", refused_step)


def test_a_worker_computes_alone():
    found = run("all2", by_the_chief_alone, same=False)["worker-0"]
    np.testing.assert_allclose(found["function"], found["loss"], rtol=1e-5)
    np.testing.assert_allclose(found["norm of function"], found["norm"], rtol=1e-5)
    assert found["norm"] > 0
