"""`fit`'s arguments and Keras's callbacks mean under parameter servers what they mean without.

Where numbers are compared exactly, either nothing is learned (`frozen`), so that it does not matter
which step comes first, or an epoch is one step.
"""

import csv
import functools
import itertools
import json
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from tests.parameter_server.options import options
from tests.support.cluster import run

pytestmark = pytest.mark.processes

BEHAVIOURS = []
ROWS, BATCH = 103, 10
BATCHES = 11

rng = np.random.default_rng(0)
x = rng.normal(size=(ROWS, 4)).astype("float32")
y = (x @ rng.normal(size=(4, 1)) + 1).astype("float32")
labels = rng.integers(0, 3, ROWS).astype("int32")


class Interrupted(Exception):
    pass


def behaviour(function, marks=()):
    """A case of two asynchronous workers, and of a folder."""

    @functools.wraps(function)
    def case(strategy, folder):
        with options(strategy):
            function(strategy, pathlib.Path(folder))

    BEHAVIOURS.append(pytest.param(case, id=function.__name__, marks=marks))
    return case


extended = functools.partial(behaviour, marks=pytest.mark.extended)


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
def models_outside_the_scope(strategy, folder):
    """Before any other model: the strategy counts from when it is made, not from its first one."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="forgotten")
    with psp.single_process():
        model.compile("sgd", "mse")
    for method in (
        lambda: model.compile("sgd", "mse"),
        lambda: model.fit(x, y, verbose=0),
        lambda: model.train_on_batch(x, y),
        lambda: model.evaluate(x, y, verbose=0),
        lambda: model.test_on_batch(x, y),
    ):
        try:
            method()
        except ValueError as error:
            assert "The model 'forgotten' was built outside the strategy's scope" in str(error)
        else:
            raise AssertionError("not refused")
    with psp.single_process():
        before = model.evaluate(x, y, verbose=0)
        model.fit(x, y, verbose=0)
        assert model.evaluate(x, y, verbose=0) < before


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
    (state,) = json.loads((folder / "seed_generators.json").read_text())
    model.load_weights(folder / "latest.weights.h5")
    assert (state, int(model.optimizer.iterations)) == ([1, 5], 5), state


@behaviour
def early_stopping(strategy, folder):
    model, recorder = linear(strategy), Recorder()
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    history = fit(
        model, epochs=10, validation_split=0.2, callbacks=[recorder, worse_after(2), stopping]
    )
    assert len(history["val_loss"]) == 4, history
    for found, expected in zip(model.get_weights(), recorder.weights[1], strict=True):
        np.testing.assert_array_equal(found, expected)


def scalars(folder):
    """The scalars in a folder of event files: a list of (step, value) by name."""
    found = {}
    for path in sorted(folder.glob("*tfevents*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    number = float(tf.make_ndarray(value.tensor))
                    found.setdefault(value.tag, []).append((event.step, number))
    return found


@extended
def tensorboard(strategy, folder):
    model = linear(strategy)
    board = keras.callbacks.TensorBoard(folder, update_freq=1, histogram_freq=1)
    history = fit(model, epochs=2, validation_data=(x, y), callbacks=[board])
    train, validation = scalars(folder / "train"), scalars(folder / "validation")
    for name in ("loss", "mae"):
        expect(train[f"epoch_{name}"], list(enumerate(history[name])))
        expect(validation[f"epoch_{name}"], list(enumerate(history[f"val_{name}"])))
        steps, values = zip(*train[f"batch_{name}"])
        assert steps == tuple(range(1, 2 * BATCHES + 1)), steps
        assert all(0 < value < 100 for value in values), values
    assert validation[f"evaluation_{name}_vs_iterations"][-1][0] == 2 * BATCHES


@extended
def learning_rates(strategy, folder):
    model, recorder = linear(strategy), Recorder()
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: [0.1, 0.0, 0.01][epoch])
    history = fit(model, epochs=3, callbacks=[schedule, recorder])
    expect(history["learning_rate"], [0.1, 0.0, 0.01])
    # The workers' steps use it.
    first, second, third = (weights[0] for weights in recorder.weights)
    np.testing.assert_array_equal(first, second)
    assert not np.allclose(second, third, rtol=0, atol=1e-6)
    model = linear(strategy, 1e-9)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=2, min_delta=1e-3)
    history = fit(model, epochs=6, callbacks=[plateau])
    expect(history["learning_rate"], [1e-9, 1e-9, 1e-9, 5e-10, 5e-10, 2.5e-10])
    expect(float(model.optimizer.learning_rate), 2.5e-10)


class Calls(keras.callbacks.Callback):
    """Keeps what it is called with at the end of batches."""

    def __init__(self):
        super().__init__()
        self.calls = {"train": [], "test": [], "predict": []}

    def on_train_batch_end(self, batch, logs=None):
        self.calls["train"].append((batch, logs))

    def on_test_batch_end(self, batch, logs=None):
        self.calls["test"].append((batch, logs))

    def on_predict_batch_end(self, batch, logs=None):
        self.calls["predict"].append((batch, logs))


@extended
def batch_logs(strategy, folder):
    for steps, ends in ((1, list(range(11))), (3, [2, 5, 8, 11])):
        model, seen = linear(strategy, steps_per_execution=steps), Calls()
        arguments = dict(batch_size=BATCH, verbose=0, callbacks=[seen])
        model.fit(x, y, validation_data=(x, y), validation_batch_size=BATCH, **arguments)
        assert model.predict(x, **arguments).shape == (ROWS, 1)
        for kind, calls in seen.calls.items():
            assert [batch for batch, _ in calls] == ends, (kind, calls)
        for _, logs in seen.calls["train"] + seen.calls["test"]:
            assert sorted(logs) == ["loss", "mae"], logs
            assert all(type(value) is float for value in logs.values()), logs
        for batch, logs in seen.calls["predict"]:
            rows = min(BATCH * steps, ROWS - BATCH * (batch + 1 - steps))
            assert np.shape(logs["outputs"]) == (rows, 1), (batch, np.shape(logs["outputs"]))


@extended
def history_is_of_all_workers(strategy, folder):
    """... and so is a log of it."""
    model = frozen(strategy)
    errors, log = outputs(model) - y, keras.callbacks.CSVLogger(folder / "log.csv")
    fit = dict(batch_size=BATCH, epochs=2, verbose=0, validation_data=(x[:37], y[:37]))
    history = model.fit(x, y, callbacks=[log], **fit).history
    expect(history["loss"], [np.mean(errors**2)] * 2)
    expect(history["mae"], [np.mean(np.abs(errors))] * 2)
    expect(history["val_loss"], [np.mean(errors[:37] ** 2)] * 2)
    expect(history["val_mae"], [np.mean(np.abs(errors[:37]))] * 2)
    with open(folder / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    for name in history:
        expect([float(row[name]) for row in rows], history[name], rtol=1e-9)


@extended
def weights_of_classes_and_samples(strategy, folder):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile(
            keras.optimizers.SGD(0.0),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="weighted")],
        )
    logits = outputs(model)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(ROWS), labels]
    right = logits.argmax(1) == labels
    of_classes, of_samples = np.array([1.0, 5.0, 0.25]), rng.uniform(0, 2, ROWS)
    for weights, kwargs in (
        (of_classes[labels], {"class_weight": dict(enumerate(of_classes))}),
        (of_samples, {"sample_weight": of_samples}),
    ):
        history = fit(model, x, labels, **kwargs)
        expect(history["loss"], [np.mean(weights * losses)])
        expect(history["accuracy"], [np.mean(right)])
        expect(history["weighted"], [np.sum(weights * right) / np.sum(weights)])
    validation = (x, labels, of_samples)
    history = fit(model, x, labels, validation_data=validation)
    expect(history["val_loss"], [np.mean(of_samples * losses)])


@behaviour
def validation_split_is_the_end_of_the_data(strategy, folder):
    model = frozen(strategy)
    history = fit(model, validation_split=0.25)
    losses = (outputs(model) - y) ** 2
    expect(history["loss"], [np.mean(losses[:77])])
    expect(history["val_loss"], [np.mean(losses[77:])])


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


@extended
def callbacks_that_evaluate_and_predict(strategy, folder):
    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                expect(self.model.predict(x, verbose=0), outputs(self.model), atol=1e-5)

        def on_epoch_end(self, epoch, logs=None):
            found = self.model.evaluate(x[:37], y[:37], verbose=0)
            expect(found[0], np.mean((outputs(self.model) - y)[:37] ** 2))

    model = frozen(strategy)
    history = fit(model, epochs=2, callbacks=[Look()])
    expect(history["loss"], [np.mean((outputs(model) - y) ** 2)] * 2)


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


@extended
def repeated_dataset(strategy, folder):
    """Epochs that do not end with the data, and data that end before their epochs."""
    numbers = np.arange(12, dtype="float32")
    data = tf.data.Dataset.from_tensor_slices((np.ones((12, 1), "float32"), numbers)).batch(2)
    model = counting(strategy)
    history = model.fit(data.repeat(), steps_per_epoch=4, epochs=3, verbose=0).history
    expect(history["loss"], [3.5, np.mean([8, 9, 10, 11, 0, 1, 2, 3]), 7.5])
    history = model.fit(data, steps_per_epoch=4, epochs=2, verbose=0).history
    expect(history["loss"][0], 3.5)


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
