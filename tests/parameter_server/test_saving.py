"""A model's files mean the same with parameter servers and without."""

import contextlib
import pathlib
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.parameter_server import extended
from tests.parameter_server.options import options
from tests.support.cluster import run
from tests.support.results import assert_close

pytestmark = pytest.mark.processes

random = np.random.default_rng(0)
x = random.integers(0, 20, (64, 4)).astype("int32")
y = random.normal(size=(64, 1)).astype("float32")


class Unsaveable(keras.layers.Layer):
    """Its state cannot be written while `broken` is set, as if its parameter server had died."""

    broken = False

    def call(self, x):
        return x

    def save_own_variables(self, store):
        if Unsaveable.broken:
            raise OSError("broken")
        super().save_own_variables(store)


def made():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,), dtype="int32")
    h = keras.layers.Embedding(20, 6)(inputs)
    h = keras.layers.Flatten()(h)
    h = keras.layers.Dense(9, activation="relu")(h)
    h = keras.layers.BatchNormalization()(h)
    h = keras.layers.Dropout(0.3, seed=5)(h)
    h = Unsaveable()(keras.layers.Dense(1)(h))
    model = keras.Model(inputs, h)
    # Slots of several kinds, an average of the weights among them.
    optimizer = keras.optimizers.Adam(0.01, amsgrad=True, use_ema=True, weight_decay=0.01)
    model.compile(optimizer, "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def train(model):
    """A few steps, one after the other: the same whoever takes them."""
    for _ in range(3):
        model.train_on_batch(x, y)


def checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def save(model, folder):
    folder.mkdir()
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    checkpoint(model).write(str(folder / "checkpoint"))


def loaded(folder):
    """A model for each kind of file in a folder, by name."""
    by_weights, by_checkpoint = made(), made()
    by_weights.load_weights(folder / "model.weights.h5")
    checkpoint(by_checkpoint).read(str(folder / "checkpoint")).assert_consumed()
    custom = {"Unsaveable": Unsaveable}
    return {
        "keras": keras.models.load_model(folder / "model.keras", custom_objects=custom),
        "weights": by_weights,
        "checkpoint": by_checkpoint,
    }


def state(name, model):
    """The values of a model and its optimizer, by place, and what it predicts."""
    # Keras saves the states of seed generators in none of its files.
    kept = [v for v in model.variables if v.name != "seed_generator_state"]
    values = {f"{name}/model/{i}": v.numpy() for i, v in enumerate(kept)}
    values |= {f"{name}/slots/{i}": v.numpy() for i, v in enumerate(model.optimizer.variables)}
    return values | {f"{name}/predictions": model.predict(x, verbose=0)}


def of_one_process(folder):
    """Trains, saves, loads, and trains on."""
    folder = pathlib.Path(folder)
    model = made()
    train(model)
    save(model, folder / "alone")
    found = state("trained", model)
    model = loaded(folder / "alone")["keras"]
    train(model)
    return found | state("continued", model)


def of_servers(strategy, folder):
    folder, found = pathlib.Path(folder), {}
    with contextlib.ExitStack() as stack:
        # Some of the variables that are cut are made as large ones are, the others by TensorFlow.
        stack.enter_context(mock.patch.object(extended, "LARGE_BYTES", 800))
        stack.enter_context(options(strategy, partitioner=2))
        stack.callback(setattr, Unsaveable, "broken", False)
        with strategy.scope():
            models = loaded(folder / "alone")
        for name, model in models.items():
            check_placement(strategy, model)
            found |= state(f"loaded {name}", model)
        model = models["keras"]
        train(model)
        found |= state("continued", model)
        # Over one that has been trained, too.
        model.load_weights(folder / "alone" / "model.weights.h5")
        found |= state("loaded again", model)
        halved = [0.5 * w for w in model.get_weights()]
        model.set_weights(halved)
        for expected, value in zip(halved, model.get_weights(), strict=True):
            np.testing.assert_array_equal(value, expected)

        model.fit(x, y, batch_size=16, verbose=0)
        save(model, folder / "served")
        found |= state("trained", model)
        with strategy.scope():
            model.export(folder / "export", verbose=False)
        check_placement(strategy, model)
        # Training goes on after an export, on the parameter servers.
        train(model)
        assert not np.array_equal(model.get_weights()[0], found["trained/model/0"])
        # Files stay as they are where one cannot be written.
        Unsaveable.broken = True
        for write, name in (model.save, "model.keras"), (model.save_weights, "model.weights.h5"):
            with pytest.raises(OSError, match="broken"):
                write(folder / "served" / name)
        assert not [path for path in (folder / "served").iterdir() if path.name.startswith(".")]
    return found


def check_placement(strategy, model):
    """Every variable is on parameter servers, and each slot beside its variable."""
    for variable in model.variables:
        assert strategy.extended.has_made(variable._value), variable.path
    optimizer = model.optimizer
    for slots in (optimizer._momentums, optimizer._velocities, optimizer._velocity_hats):
        for variable, slot in zip(model.trainable_variables, slots, strict=True):
            assert servers_of(slot) == servers_of(variable), slot.path
            # A bias of one number cannot be cut.
            parts = 2 if variable.shape[0] > 1 else 1
            assert len(set(servers_of(variable))) == parts, variable.path


def servers_of(variable):
    """The parameter server of each part of a Keras variable."""
    parts = getattr(variable._value, "shards", [variable._value])
    devices = [part.device for part in parts]
    assert all("/job:ps/" in device for device in devices), (variable.path, devices)
    return devices


def of_another_process(folder):
    """Loads what parameter servers have saved."""
    folder, found = pathlib.Path(folder), {}
    for name, model in loaded(folder / "served").items():
        found |= state(name, model)
    exported = tf.saved_model.load(str(folder / "export"))
    return found | {"exported": exported.serve(x).numpy()}


def assert_same(found, name, expected, wanted, tolerance=0.0):
    """What begins with a name is the same as what begins with another one."""

    def of(arrays, name):
        begin = f"{name}/"
        return {key.removeprefix(begin): arrays[key] for key in arrays if key.startswith(begin)}

    found, expected = of(found, name), of(expected, wanted)
    # Predictions are computed in batches of another size, maybe.
    last = [{"": arrays.pop("predictions")} for arrays in (found, expected)]
    assert_close(*last, max(tolerance, 1e-6))
    assert_close(found, expected, tolerance)


@pytest.mark.extended
def test_models_go_to_parameter_servers_and_back(tmp_path):
    alone = run("plain", of_one_process, folder=tmp_path).first
    served = run("async_threads", of_servers, folder=tmp_path).first
    for name in ("loaded keras", "loaded weights", "loaded checkpoint", "loaded again"):
        assert_same(served, name, alone, "trained")
    assert_same(served, "continued", alone, "continued", 1e-5)
    assert not np.allclose(alone["continued/predictions"], alone["trained/predictions"], atol=1e-3)
    back = run("plain", of_another_process, folder=tmp_path).first
    for name in ("keras", "weights", "checkpoint"):
        assert_same(back, name, served, "trained")
    np.testing.assert_allclose(back["exported"], served["trained/predictions"], rtol=0, atol=1e-6)
