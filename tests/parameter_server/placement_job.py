"""Trains models whose variables are cut unevenly, and looks at where they are and what comes out.

The chief of a cluster with two workers and three parameter servers, of which the last one is to
have half of the bytes.
"""

import os
import pathlib
import tempfile

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.parameter_server import reports

IDS, DIM, STEPS, BATCH = 1001, 64, 12, 16
WEIGHTS = [1, 1, 2]

rng = np.random.default_rng(0)
ids = rng.integers(0, IDS, (STEPS * BATCH, 3)).astype("int32")
labels = rng.normal(size=(STEPS * BATCH, 1)).astype("float32")


def make(optimizer=None):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(IDS, DIM),
            keras.layers.Flatten(),
            keras.layers.Dense(701, activation="tanh"),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(1, use_bias=False),
        ],
        name="placed",
    )
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse")
    return model


def fit(model, **kwargs):
    return model.fit(ids, labels, batch_size=BATCH, shuffle=False, verbose=0, **kwargs)


def weights_alone(steps, optimizer=None):
    with psp.single_process():
        model = make(optimizer)
        model.fit(
            ids[: steps * BATCH],
            labels[: steps * BATCH],
            batch_size=BATCH,
            shuffle=False,
            verbose=0,
        )
        return model.get_weights()


def assert_close(found, expected, atol):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def places_are_in_proportion(strategy):
    with strategy.scope():
        model = make()
    fit(model)
    table = model.layers[0].embeddings.value
    kernel = model.layers[2].kernel.value
    assert [len(v.shards) for v in (table, kernel)] == [3, 3]
    rows = [shard.shape[0] for shard in table.shards]
    assert len(set(rows)) > 1, rows  # not as TensorFlow cuts
    for slot, variable in zip(model.optimizer._momentums, model.trainable_variables, strict=True):
        of_slot, of_variable = (
            [part.device for part in getattr(v.value, "shards", [v.value])]
            for v in (slot, variable)
        )
        assert of_slot == of_variable
    sizes = reports.bytes_on_ps([*model.variables, *model.optimizer.variables], 3)
    # The optimizer's are among the model's: those count once more, alike on all.
    for size, weight in zip(sizes, WEIGHTS):
        assert size <= 1.1 * sum(sizes) * weight / 4, sizes


def no_update_is_lost(strategy, compression):
    with strategy.scope():
        model = make(keras.optimizers.SGD(0.01))
    fit(model, epochs=4)
    assert int(model.optimizer.iterations.numpy()) == 4 * STEPS
    assert np.isfinite(np.concatenate([w.ravel() for w in model.get_weights()])).all()
    if compression is None:
        # Rows that are looked up are those that are written.
        found = model.layers[0](ids[:5])
        np.testing.assert_array_equal(found, model.get_weights()[0][ids[:5]])


def files_of_other_placements_load(strategy):
    folder = pathlib.Path(tempfile.mkdtemp())
    with psp.single_process():
        alone = make()
        alone.fit(ids, labels, batch_size=BATCH, verbose=0)
        alone.save(folder / "alone.keras")
        tf.train.Checkpoint(model=alone).write(str(folder / "alone"))
    expected = alone.get_weights()
    with strategy.scope():
        # A model before it: each of its variables is cut elsewhere.
        keras.layers.Dense(300).build((None, 217))
        loaded = keras.models.load_model(folder / "alone.keras")
        restored = make()
        restored.optimizer.build(restored.trainable_variables)
    tf.train.Checkpoint(model=restored).read(
        str(folder / "alone")
    ).assert_existing_objects_matched()
    for model in (loaded, restored):
        assert_close(model.get_weights(), expected, 0)
        assert_close(
            [v.numpy() for v in model.optimizer.variables],
            [v.numpy() for v in alone.optimizer.variables],
            0,
        )
    fit(loaded)
    tf.train.Checkpoint(model=loaded).write(str(folder / "cut"))
    with strategy.scope():
        keras.layers.Dense(300).build((None, 111))
        other = make()
        other.optimizer.build(other.trainable_variables)
    shards = [
        [shard.shape[0] for shard in model.layers[0].embeddings.value.shards]
        for model in (loaded, other)
    ]
    assert shards[0] != shards[1], shards
    tf.train.Checkpoint(model=other).read(str(folder / "cut")).assert_existing_objects_matched()
    assert_close(other.get_weights(), loaded.get_weights(), 0)


def synchronous_equals_one_process(strategy):
    with strategy.scope():
        model = make()
    fit(model)
    assert_close(model.get_weights(), weights_alone(STEPS), 1e-4)


def main():
    mode = os.environ.get("PLACEMENT_MODE", "async")
    strategy = psp.ParameterServerStrategy(
        ps_weights=WEIGHTS, mode=mode, compression=os.environ.get("PLACEMENT_COMPRESSION")
    )
    if mode == "sync":
        synchronous_equals_one_process(strategy)
    else:
        places_are_in_proportion(strategy)
        no_update_is_lost(strategy, None)
        files_of_other_placements_load(strategy)
    print("all cases are as expected")


if __name__ == "__main__":
    main()
