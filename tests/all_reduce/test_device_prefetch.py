"""Batches that are on their devices before a step are the same ones."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.all_reduce.data import elements
from keras_psplus.all_reduce.extended import MultiWorkerMirroredExtended
from tests.support.cluster import run
from tests.support.results import assert_close

pytestmark = pytest.mark.processes

# The last batch has one row, and most replicas have none.
ROWS, BATCH = 25, 8


def data_of():
    x = np.random.default_rng(0).normal(size=(ROWS, 5)).astype("float32")
    y = x.sum(1, keepdims=True)
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=1).batch(BATCH)}


def trained(ahead):
    """Has batches copied to their devices ahead, as on GPUs, or not."""
    made, on_devices = [], elements.on_devices

    def note(*args):
        made.append(on_devices(*args))
        return made[-1]

    with (
        mock.patch.object(elements, "on_devices", note),
        mock.patch.object(MultiWorkerMirroredExtended, "fetches_to_devices", ahead),
    ):
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        logs = model.fit(**data_of(), epochs=2, verbose=0).history
        logs["evaluated"] = model.evaluate(**data_of(), verbose=0)
    # Of `fit` and of `evaluate`.
    assert len(made) == 2 * ahead
    strategy = tf.distribute.get_strategy()
    for distributed in made:
        batch = strategy.experimental_local_results(next(iter(distributed)))
        devices = [part.data[0].device for part in batch]
        assert devices == list(strategy.extended.worker_devices), devices
    return model, logs


@pytest.mark.extended
def test_batches_are_the_same_on_their_devices_as_in_the_step():
    later = run("devices2", trained, ahead=False).first
    assert_close(run("devices2", trained, ahead=True).first, later, 0)
