"""What the workers of Ray run in tests."""

import os
import pathlib
import signal

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
    """What each worker runs; the second one is killed once, in the second epoch."""
    folder = pathlib.Path(config["folder"])
    rank = ray.train.get_context().get_world_rank()
    strategy = psp.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make_model()
    assert strategy.num_replicas_in_sync == 2
    begin = ray_train.restore(model, strategy)
    with open(folder / f"begins-{rank}", "a") as begins:
        begins.write(f"{begin} ")

    def kill(batch, logs=None):
        mark = folder / "killed"
        if rank == 1 and model.optimizer.iterations == 4 and not mark.exists():
            # Else Ray may not yet have heard of the first epoch's, and begin from the start.
            assert len(ray.train.get_all_reported_checkpoints()) == 1
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    killer = keras.callbacks.LambdaCallback(on_train_batch_end=kill)
    fit(model, initial_epoch=begin, callbacks=[ray_train.Report(), killer])
    if rank == 0:
        np.savez(folder / "weights.npz", *model.get_weights())
