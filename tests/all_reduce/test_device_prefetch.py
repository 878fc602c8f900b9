"""Batches that are on their devices before a step are the same ones."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.all_reduce.data import device_prefetch
from keras_psplus.all_reduce.extended import MultiWorkerMirroredExtended
from tests.support.cluster import run
from tests.support.results import assert_close
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

# The last batch has one row, and most replicas have none.
ROWS, BATCH = 25, 8


def data_of(kind):
    x = np.random.default_rng(0).normal(size=(ROWS, 5)).astype("float32")
    y = x.sum(1, keepdims=True)
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH}
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=1).batch(BATCH)}


def trained(kind, ahead, steps=1):
    """Has batches copied to their devices ahead, as on GPUs, or not."""
    made, on_devices = [], device_prefetch.on_devices

    def note(*args):
        made.append(on_devices(*args))
        return made[-1]

    with (
        mock.patch.object(device_prefetch, "on_devices", note),
        mock.patch.object(MultiWorkerMirroredExtended, "fetches_to_devices", ahead),
    ):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        options = {"metrics": ["mae"], "steps_per_execution": steps}
        model.compile(keras.optimizers.Adam(0.01), "mse", **options)
        logs = model.fit(**data_of(kind), epochs=2, verbose=0).history
        logs["evaluated"] = model.evaluate(**data_of(kind), verbose=0)
    # Of `fit` and of `evaluate`, but not where several steps are one call.
    assert len(made) == 2 * (ahead and steps == 1)
    strategy = tf.distribute.get_strategy()
    for distributed in made:
        batch = strategy.experimental_local_results(next(iter(distributed)))
        devices = [part.data[0].device for part in batch]
        assert devices == list(strategy.extended.worker_devices), devices
    return model, logs


@pytest.mark.parametrize(
    "layout, kind, steps",
    [
        ("devices2", "dataset", 1),
        *extended(("hosts", "arrays", 2)),
    ],
)
def test_batches_are_the_same_on_their_devices_as_in_the_step(layout, kind, steps):
    later = run(layout, trained, kind=kind, steps=steps, ahead=False).first
    assert_close(run(layout, trained, kind=kind, steps=steps, ahead=True).first, later, 0)
