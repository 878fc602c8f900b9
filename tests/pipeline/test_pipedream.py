"""`schedule="pipedream"` beside a simulation in plain Keras: gradients by the weights before."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.pipeline import microbatches
from tests.pipeline.models import (
    CROSSENTROPY,
    Task,
    X,
    Y,
    skips,
)
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

layers = keras.layers
COUNT = 3


def normalised():
    stack = [layers.Dense(12), layers.BatchNormalization(momentum=0.7), layers.Dense(8)]
    return Task(keras.Sequential([*stack, layers.BatchNormalization(), layers.Dense(3)]))


def compiled(make):
    keras.utils.set_random_seed(3)
    task = make()
    optimizer = keras.optimizers.SGD(0.2, momentum=0.9, global_clipnorm=1.0, use_ema=True)
    task.model.compile(optimizer, CROSSENTROPY, metrics=["accuracy"])
    return task.model, task.x


def read(variables):
    return [variable.numpy() for variable in variables]


def write(variables, values):
    for variable, value in zip(variables, values):
        variable.assign(value)


def times(gradient, part):
    # Keras clips the rows of an embedding's gradient as they come, with repeated ones.
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * part, gradient.indices, gradient.dense_shape)
    return gradient * part


def plus(a, b):
    if isinstance(a, tf.IndexedSlices):
        values, indices = tf.concat([a.values, b.values], 0), tf.concat([a.indices, b.indices], 0)
        return tf.IndexedSlices(values, indices, a.dense_shape)
    return a + b


def gradients(model, x, y):
    """Loss and gradients of a batch, the mean of those of its micro-batches."""
    total, sums = 0.0, None
    for first, end in microbatches.bounds(len(x), COUNT):
        part = (end - first) / len(x)
        with tf.GradientTape() as tape:
            loss = model.compute_loss(
                x=x[first:end], y=y[first:end], y_pred=model(x[first:end], training=True)
            )
        found = tape.gradient(loss, [v.value for v in model.trainable_variables])
        found = [times(one, part) for one in found]
        sums = found if sums is None else [plus(a, b) for a, b in zip(sums, found)]
        total += part * float(loss)
    return total, sums


def simulate(make, batch_size, epochs):
    """Weights and losses of training by gradients of the weights before the last update."""
    keras.backend.clear_session()
    with psp.single_process():
        model, x = compiled(make)
        model(x[:2])
        weights, losses = model.trainable_variables, []
        model.optimizer.build(weights)
        for _ in range(epochs):
            before, total = read(weights), 0.0
            for first in range(0, len(x), batch_size):
                batch = x[first : first + batch_size], Y[first : first + batch_size]
                now = read(weights)
                write(weights, before)
                loss, grads = gradients(model, *batch)
                write(weights, now)
                model.optimizer.apply(grads, weights)
                before, total = now, total + loss * len(batch[0])
            losses.append(total / len(x))
        model.optimizer.finalize_variable_values(weights)
        return model.get_weights(), losses


def fit(strategy, make, callbacks=(), **options):
    keras.backend.clear_session()
    with strategy.scope():
        model, x = compiled(make)
    options = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0, **options}
    return model, model.fit(x, Y, callbacks=list(callbacks), **options).history


@pytest.mark.parametrize("make", extended(skips, normalised))
def test_equals_a_simulation_of_its_staleness(make, pipeline):
    weights, losses = simulate(make, 16, 3)
    model, history = fit(pipeline(2, microbatches=COUNT, schedule="pipedream"), make)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
    for own, other in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


@pytest.mark.extended
def test_two_batches_are_under_way(pipeline):
    strategy, found = pipeline(2, schedule="pipedream"), []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps = strategy.engine.context.under_way
            found.append((len(steps._under_way), set(logs)))

    model, _ = fit(strategy, skips, [Look()], epochs=1)
    assert found == [(1, {"loss", "accuracy"}), *[(2, {"loss", "accuracy"})] * 3]
    assert strategy.engine.context.under_way is None
    assert int(model.optimizer.iterations) == 4


@pytest.mark.extended
def test_whoever_looks_sees_all_updates(pipeline, tmp_path):
    """Reading a weight, saving and evaluating end the steps that are under way."""

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            iterations = self.model.optimizer.iterations
            # Not by Keras's variable, which ends the steps.
            before = int(iterations.value)
            (
                self.model.trainable_variables[0].numpy,
                lambda: self.model.save_weights(tmp_path / "w.weights.h5"),
                lambda: self.model.evaluate(X[:8], Y[:8], verbose=0),
                lambda: self.model.predict(X[:8], verbose=0),
            )[batch]()
            found.append((before, int(iterations.value)))

    found = []
    model, _ = fit(pipeline(2, schedule="pipedream"), skips, [Looks()], epochs=1)
    assert found == [(0, 1), (1, 2), (2, 3), (3, 4)]
    # With no batch under way there is no stale gradient: this is plain training.
    keras.backend.clear_session()
    with psp.single_process():
        plain, _ = compiled(skips)
        plain.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    for own, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


@pytest.mark.extended
def test_batches_that_the_script_gives_are_updated_at_once(pipeline):
    keras.backend.clear_session()
    with psp.single_process():
        plain, _ = compiled(skips)
        expected = [plain.train_on_batch(X[i : i + 16], Y[i : i + 16]) for i in (0, 16, 32)]
    keras.backend.clear_session()
    with pipeline(2, schedule="pipedream").scope():
        model, _ = compiled(skips)
    found = [model.train_on_batch(X[i : i + 16], Y[i : i + 16]) for i in (0, 16, 32)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_step_that_fails_ends_fit_and_the_next_fit_works(pipeline):
    class Fails(layers.Layer):
        def call(self, x):
            return tf.debugging.check_numerics(x, "not a number")

    def make():
        stack = [layers.Dense(8), Fails(), layers.Dropout(0.1), layers.Dense(3)]
        return Task(keras.Sequential(stack))

    model, _ = fit(pipeline(2, schedule="pipedream"), make)
    bad = X.copy()
    bad[20] = np.nan
    with pytest.raises(tf.errors.InvalidArgumentError, match="not a number"):
        model.fit(bad, Y, batch_size=16, verbose=0, shuffle=False)
    before = int(model.optimizer.iterations)
    model.fit(X, Y, batch_size=16, verbose=0, shuffle=False)
    assert int(model.optimizer.iterations) == before + 4


class UpdatesTwice(keras.Sequential):
    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


class Normalises(keras.Sequential):
    def train_step(self, data):
        for variable in self.trainable_variables:
            variable.assign(variable * 0.99)
        return super().train_step(data)


@pytest.mark.parametrize(
    "kind, message",
    [
        (UpdatesTwice, "updates weights once.*Received: 2 updates"),
        (Normalises, "by their optimizer alone.*assigns .*kernel"),
    ],
)
def test_what_it_cannot_keep_in_order_is_refused(kind, message, pipeline):
    def make():
        return Task(kind([layers.Dense(8), layers.Dense(3)]))

    with pytest.raises(ValueError, match=message):
        fit(pipeline(2, schedule="pipedream"), make)


def test_a_loss_scale_is_refused(pipeline):
    def make():
        stack = [layers.Dense(8, dtype="mixed_float16"), layers.Dense(3, dtype="mixed_float16")]
        return Task(keras.Sequential(stack))

    keras.backend.clear_session()
    with pipeline(2, schedule="pipedream").scope():
        model = make().model
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), CROSSENTROPY)
    with pytest.raises(ValueError, match="A loss scale changes.*Received: "):
        model.fit(X, Y, verbose=0)
