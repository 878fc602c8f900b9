"""`fit`'s arguments and Keras's callbacks mean under parameter servers what they mean without.

Where numbers are compared exactly, either nothing is learned (`frozen`), so that it does not matter
which step comes first, or an epoch is one step.
"""

import functools
import itertools
import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.parameter_server.options import options
from tests.support.cluster import run

pytestmark = pytest.mark.processes

BEHAVIOURS = []
ROWS, BATCH = 103, 10
BATCHES = 11

rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 4)).astype("float32")
y = (x @ rng.normal(size=(4, 1)) + 1).astype("float32")


class Interrupted(Exception):
    pass


def behaviour(function):
    """A case of two asynchronous workers, and of a folder."""

    @functools.wraps(function)
    def case(strategy, folder):
        with options(strategy):
            function(strategy, pathlib.Path(folder))

    BEHAVIOURS.append(pytest.param(case, id=function.__name__))
    return case


def make_linear(strategy, **kwargs):
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"], **kwargs)
    return model, model.get_weights()


_made = functools.cache(make_linear)


def linear(strategy, rate=0.01, **kwargs):
    """The model of most behaviours, as new: it is made once, since tracing takes longest."""
    model, weights = _made(strategy, **kwargs)
    model.set_weights(weights)
    model.optimizer.learning_rate = rate
    model.optimizer.iterations.assign(0)
    return model


def frozen(strategy):
    """A model whose loss is that of its first weights, whatever is fitted."""
    return linear(strategy, 0.0)


def outputs(model, x=x):
    kernel, bias = model.get_weights()
    return x @ kernel + bias


def fit(model, inputs=x, targets=y, **kwargs):
    return model.fit(inputs, targets, **{"batch_size": BATCH, "verbose": 0} | kwargs).history


def expect(found, expected, **kwargs):
    np.testing.assert_allclose(found, expected, **({"rtol": 1e-5} | kwargs))


class Recorder(keras.callbacks.Callback):
    """Keeps the weights at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(self.model.get_weights())


def worse_after(epochs):
    """A learning rate that spoils the weights after some epochs."""
    return keras.callbacks.LearningRateScheduler(lambda epoch, _: 0.05 if epoch < epochs else 2.0)


@behaviour
def checkpoints(strategy, folder):
    model, recorder = linear(strategy), Recorder()
    best = folder / "best.weights.h5"
    callbacks = [
        recorder,
        worse_after(2),
        keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras"),
        keras.callbacks.ModelCheckpoint(best, save_best_only=True, save_weights_only=True),
        keras.callbacks.ModelCheckpoint(
            folder / "in_epoch.{epoch}.{batch}.weights.h5", save_freq=8, save_weights_only=True
        ),
    ]
    history = fit(model, epochs=3, validation_data=(x, y), callbacks=callbacks)
    # Saves within the epoch are no new beginning.
    assert sum(strategy.steps_by_worker) == BATCHES, strategy.steps_by_worker
    names = sorted(path.name for path in folder.iterdir())
    in_epoch = [f"in_epoch.{n}.weights.h5" for n in ("1.8", "2.5", "3.10", "3.2")]
    assert names == ["1.keras", "2.keras", "3.keras", "best.weights.h5", *in_epoch], names
    assert np.argmin(history["val_loss"]) == 1, history
    for epoch, weights in enumerate(recorder.weights, 1):
        loaded = keras.models.load_model(folder / f"{epoch}.keras")
        for found, expected in zip(loaded.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(found, expected)
        assert int(loaded.optimizer.iterations) == epoch * BATCHES
    loaded.load_weights(best)
    np.testing.assert_array_equal(loaded.get_weights()[0], recorder.weights[1][0])
    # Also what was saved while steps were under way holds all those that were sent before.
    loaded.load_weights(folder / in_epoch[1])
    assert int(loaded.optimizer.iterations) == 16


@behaviour
def backup_within_an_epoch(strategy, folder):
    """Steps under way are waited for, also for the seeds."""

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 7:
                raise Interrupted

    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    backup = keras.callbacks.BackupAndRestore(folder, save_freq=5, delete_checkpoint=False)
    try:
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[backup, Interrupt()])
    except Interrupted:
        pass
    (backup,) = folder.glob("backup-*")
    (state,) = json.loads((backup / "seed_generators.json").read_text())
    model.load_weights(backup / "latest.weights.h5")
    assert (state, int(model.optimizer.iterations)) == ([1, 5], 5), state


@behaviour
def a_callback_ends_training_within_an_epoch(strategy, folder):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 6

    model = frozen(strategy)
    history = model.fit(
        x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=[Stop()]
    )
    assert history.epoch == [0]
    assert int(model.optimizer.iterations) == 7
    # What was under way is counted.
    expect(history.history["loss"], [np.mean((outputs(model) - y)[:70] ** 2)])
    assert float(model.metrics[0].count) == 70


@behaviour
def fit_after_a_callback_that_raised(strategy, folder):
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 6:
                raise Interrupted

    model, _ = make_linear(strategy)
    model.optimizer.learning_rate = 0.0
    try:
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Interrupt()])
    except Interrupted:
        pass
    history = model.fit(x[:50], y[:50], batch_size=BATCH, verbose=0).history
    expect(history["loss"], [np.mean((outputs(model) - y)[:50] ** 2)])
    assert float(model.metrics[0].count) == 50


@functools.cache
def counting(strategy):
    """A model whose absolute error is its target, so that a mean of it tells which were seen."""
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        model.compile(keras.optimizers.SGD(0.0), "mae")
    return model


@behaviour
def infinite_dataset(strategy, folder):
    """Each epoch goes on where the one before has ended; each fit starts anew, as Keras does."""
    numbers = tf.data.Dataset.range(1 << 40).map(lambda n: (tf.ones([1]), tf.cast(n, "float32")))
    model, data = counting(strategy), numbers.batch(2)
    history = model.fit(data, steps_per_epoch=5, epochs=3, verbose=0)
    expect(history.history["loss"], [4.5, 14.5, 24.5])
    history = model.fit(data, steps_per_epoch=5, epochs=5, initial_epoch=3, verbose=0)
    assert history.epoch == [3, 4]
    expect(history.history["loss"], [4.5, 14.5])
    history = model.fit(
        data, steps_per_epoch=3, epochs=2, verbose=0, validation_data=data, validation_steps=4
    ).history
    expect(history["val_loss"], [3.5, 3.5])

    def pairs():
        for n in itertools.count(0, 2):
            yield np.ones((2, 1), "float32"), np.float32([[n], [n + 1]])

    history = model.fit(pairs(), steps_per_epoch=5, epochs=3, verbose=0).history
    expect(history["loss"], [4.5, 14.5, 24.5])


def epochs_until_nan(strategy, place, rows=40, raise_error=False):
    """Epochs and batches that training on rows one by one takes, of which one is not a number."""
    targets = np.zeros(rows, "float32")
    targets[place] = np.nan
    seen = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    nan = keras.callbacks.TerminateOnNaN(raise_error=raise_error)
    history = linear(strategy).fit(
        np.ones((rows, 4), "float32"),
        targets,
        batch_size=1,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[nan, note],
    )
    return history.epoch, len(seen)


@behaviour
def a_loss_of_nan_ends_its_epoch(strategy, folder):
    for place in (39, 38, 37, 36, 35):
        epochs, _ = epochs_until_nan(strategy, place)
        assert epochs == [0], (place, epochs)
    # What is under way goes on, a few steps for each worker.
    epochs, batches = epochs_until_nan(strategy, 5, rows=200)
    assert epochs == [0] and batches < 60, (epochs, batches)
    try:
        epochs_until_nan(strategy, 39, raise_error=True)
    except RuntimeError as error:
        assert "NaN or Inf loss encountered at batch 39" in str(error), error
    else:
        raise AssertionError("not raised")
    # It has no bearing on a training that comes after.
    assert len(linear(strategy).fit(x, y, epochs=2, verbose=0).epoch) == 2


@pytest.mark.parametrize("case", BEHAVIOURS)
def test_behaviour(case, tmp_path):
    run("async22", case, folder=tmp_path)
