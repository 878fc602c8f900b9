"""Models go from one process to parameter servers and back, by every kind of file.

saving_job.py FOLDER

A process trains and saves a model; then, as the chief of a cluster of threads, it loads the files,
trains and saves, with whole and with sharded variables. What each model holds meanwhile is written
to `<kind>.<name>.npz` and looked at by `test_saving.py`.
"""

import os
import pathlib
import sys

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.cluster.in_process import InProcessCluster
from keras_psplus.parameter_server.placement import shard_sizes

STEPS = 4

rng = np.random.default_rng(0)
x = rng.integers(0, 20, (64, 4)).astype("int32")
y = rng.normal(size=(64, 1)).astype("float32")


@keras.saving.register_keras_serializable("saving_job")
class Unsaveable(keras.layers.Layer):
    """Its state cannot be written while `broken` is set, as if its parameter server had died."""

    broken = False

    def call(self, x):
        return x

    def save_own_variables(self, store):
        if Unsaveable.broken:
            raise OSError("broken")
        super().save_own_variables(store)


def make():
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
    for _ in range(STEPS):
        model.train_on_batch(x, y)


def checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


def save(model, folder):
    model.save(folder / "model.keras")
    model.save_weights(folder / "model.weights.h5")
    checkpoint(model).write(str(folder / "checkpoint"))


def state(model):
    """The values of a model and its optimizer, by place, and what it predicts."""
    # Keras saves the states of seed generators in none of its files.
    kept = [v for v in model.variables if v.name != "seed_generator_state"]
    values = {f"model/{i}": v.numpy() for i, v in enumerate(kept)}
    values |= {f"optimizer/{i}": v.numpy() for i, v in enumerate(model.optimizer.variables)}
    return values | {"predictions": model.predict(x, verbose=0)}


def loaded(folder):
    """A model for each kind of file in a folder, by name."""
    by_weights, by_checkpoint = make(), make()
    by_weights.load_weights(folder / "model.weights.h5")
    checkpoint(by_checkpoint).read(str(folder / "checkpoint")).assert_consumed()
    return {
        "keras": keras.models.load_model(folder / "model.keras"),
        "weights": by_weights,
        "checkpoint": by_checkpoint,
    }


def check_placement(strategy, model, sharded):
    """Every variable is on parameter servers, and each slot beside its variable."""
    for variable in model.variables:
        assert strategy.extended.has_made(variable._value), variable.path
    optimizer = model.optimizer
    for slots in (optimizer._momentums, optimizer._velocities, optimizer._velocity_hats):
        for variable, slot in zip(model.trainable_variables, slots, strict=True):
            assert servers_of(slot) == servers_of(variable), slot.path
            # A bias of one number cannot be cut.
            parts = 2 if sharded and variable.shape[0] > 1 else 1
            assert len(set(servers_of(variable))) == parts, variable.path


def servers_of(variable):
    """The parameter server of each part of a Keras variable."""
    parts = getattr(variable._value, "shards", [variable._value])
    devices = [part.device for part in parts]
    assert all("/job:ps/" in device for device in devices), (variable.path, devices)
    return devices


def alone(folder):
    model = make()
    train(model)
    (folder / "alone").mkdir()
    save(model, folder / "alone")
    np.savez(folder / "alone.trained.npz", **state(model))
    model = loaded(folder / "alone")["keras"]
    train(model)
    np.savez(folder / "alone.continued.npz", **state(model))


def in_cluster(cluster, folder, kind):
    partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
    strategy = psp.ParameterServerStrategy(
        cluster.cluster_resolver, variable_partitioner=partitioner if kind == "sharded" else None
    )

    def write(name, model):
        np.savez(folder / f"{kind}.{name}.npz", **state(model))

    with strategy.scope():
        models = loaded(folder / "alone")
    for name, model in models.items():
        check_placement(strategy, model, kind == "sharded")
        write(f"loaded_{name}", model)
    model = models["keras"]
    train(model)
    write("continued", model)
    # Over one that has been trained, too.
    model.load_weights(folder / "alone" / "model.weights.h5")
    write("loaded_again", model)
    halved = [0.5 * w for w in model.get_weights()]
    model.set_weights(halved)
    for expected, found in zip(halved, model.get_weights(), strict=True):
        np.testing.assert_array_equal(found, expected)

    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    own = folder / kind
    own.mkdir()
    save(model, own)
    write("trained", model)
    with strategy.scope():
        model.export(own / "export", verbose=False)
    check_placement(strategy, model, kind == "sharded")
    # Training goes on after an export, on the parameter servers.
    before = model.get_weights()[0]
    model.fit(x, y, batch_size=8, verbose=0)
    assert not np.array_equal(before, model.get_weights()[0])

    Unsaveable.broken = True
    for path in (own / "model.keras", own / "model.weights.h5"):
        try:
            (model.save if path.suffix == ".keras" else model.save_weights)(path)
        except OSError:
            continue
        raise AssertionError(f"{path} was written")


def main():
    folder = pathlib.Path(sys.argv[1])
    alone(folder)
    # Some of the variables that are cut are made as large ones are, the others by TensorFlow.
    shard_sizes.LARGE_BYTES = 800
    with InProcessCluster(workers=2, ps=2) as cluster:
        for kind in ("whole", "sharded"):
            Unsaveable.broken = False
            in_cluster(cluster, folder, kind)
            print(f"done {kind}", flush=True)
    sys.stdout.flush()
    # The servers cannot be stopped in any other way.
    os._exit(0)


if __name__ == "__main__":
    main()
