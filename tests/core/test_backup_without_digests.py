"""A backup whose digests were deleted goes on where its weights are."""

import pathlib
import shutil
import tempfile

import keras
import numpy as np
import pytest

from tests.support.cluster import run

pytestmark = pytest.mark.processes
BATCHES = 6


class Interrupted(Exception):
    pass


class Batches(keras.callbacks.Callback):
    """Notes each batch, and ends the training after one."""

    def __init__(self, last=None):
        super().__init__()
        self.seen, self._last = [], last

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((self.params["epochs"], batch))
        if len(self.seen) == self._last:
            raise Interrupted


def trained(folder, last=None):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    x = np.random.default_rng(0).normal(size=(4 * BATCHES, 3)).astype("float32")
    batches = Batches(last)
    backup = keras.callbacks.BackupAndRestore(folder, save_freq=2, delete_checkpoint=False)
    options = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}
    try:
        model.fit(x, x[:, :2], callbacks=[backup, batches], **options)
    except Interrupted:
        pass
    return model, len(batches.seen)


def goes_on_without_digests():
    with tempfile.TemporaryDirectory() as folder:
        whole, _ = trained(f"{folder}/whole")
        trained(f"{folder}/first", last=BATCHES + 5)
        pathlib.Path(folder, "first/digests.json").unlink()
        again, steps = trained(f"{folder}/first")
    weights = zip(again.get_weights(), whole.get_weights())
    return {"steps": steps, "off": max(np.abs(a - b).max() for a, b in weights)}


def other_weights_than_the_state():
    """Weights of the epoch's begin, as of another program, beside a state of a later batch."""
    with tempfile.TemporaryDirectory() as folder:
        trained(f"{folder}/older", last=BATCHES + 1)
        trained(f"{folder}/first", last=BATCHES + 5)
        for name in ("latest.weights.h5", "training_metadata.json"):
            shutil.copy(f"{folder}/older/{name}", f"{folder}/first/{name}")
        pathlib.Path(folder, "first/digests.json").unlink()
        return {"steps": trained(f"{folder}/first")[1]}


@pytest.mark.extended
def test_it_goes_on_at_its_batch():
    found = run("devices2", goes_on_without_digests).first
    assert found["steps"] == 3 * BATCHES - (BATCHES + 4)
    assert found["off"] < 1e-6


def test_a_state_of_other_weights_is_not_used():
    results = run("devices2", other_weights_than_the_state)
    assert results.first["steps"] % BATCHES == 0
    assert "is of other weights than those there" in results.logs["process"]
