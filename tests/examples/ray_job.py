"""What the workers of Ray run in tests."""

import os
import pathlib
import signal
import time

import keras
import numpy as np
import ray.train

import keras_psplus as psp
from examples import ray_train

ROWS, BATCH, EPOCHS = 48, 16, 3


def data():
    x = np.random.default_rng(0).normal(size=(ROWS, 8)).astype("float32")
    return x, x[:, :4]


def make_model():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


def fit(model, epochs=EPOCHS, **options):
    return model.fit(
        *data(), batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **options
    ).history


def train(config):
    """What each worker runs. In the second epoch the last one is killed once, or a node."""
    folder = pathlib.Path(config["folder"])
    context = ray.train.get_context()
    rank = context.get_world_rank()
    strategy = psp.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model()
    assert strategy.num_replicas_in_sync == context.get_world_size()
    begin = ray_train.restore(model, strategy)
    with open(folder / f"begins-{rank}", "a") as begins:
        begins.write(f"{begin} ")

    def lose_worker(batch, logs=None):
        if model.optimizer.iterations != 4 or (folder / "lost").exists():
            return
        # Else Ray may not yet have heard of the first epoch's, and begin from the start.
        assert len(ray.train.get_all_reported_checkpoints()) == 1
        if config["loses"] == "worker" and rank == context.get_world_size() - 1:
            (folder / "lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        elif config["loses"] == "node":
            (folder / f"ready-{rank}").touch()
            wait_for(folder / "lost")

    loser = keras.callbacks.LambdaCallback(on_train_batch_end=lose_worker)
    fit(model, initial_epoch=begin, callbacks=[ray_train.Report(), loser])
    if rank == 0:
        np.savez(folder / "weights.npz", *model.get_weights())


def wait_for(path, seconds=60):
    """Waits for a file that another process makes."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)
