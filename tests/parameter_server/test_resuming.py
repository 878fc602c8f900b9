"""Training that is broken off goes on in another cluster, at the very step.

`tests/faults/test_sizes.py` kills synchronous training, which goes on with other servers.
"""

import contextlib
import pathlib

import keras
import numpy as np
import pytest

from keras_psplus import compression
from keras_psplus.core import worker_state
from tests.parameter_server.options import options
from tests.support.cluster import run
from tests.support.results import assert_close

pytestmark = pytest.mark.processes

ROWS, EPOCHS = 70, 4
random = np.random.default_rng(0)
x = random.integers(0, 50, (ROWS, 4)).astype("int32")
y = random.normal(size=(ROWS, 1)).astype("float32")
# Keeps more than a residual.
POWERSGD = compression.ByVariable(
    {"*": compression.PowerSGD(1, min_compression_rate=1)}, min_size=1, min_rank=0
)


class Interrupted(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    """Breaks off after a batch of the third epoch."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (2, self.batch):
            raise Interrupted


def train(
    strategy,
    folder=None,
    interrupt=None,
    batch_size=10,
    dropout=0.0,
    is_compressed=False,
):
    """Trains, from the folder's backup if there is one, and is interrupted after a batch."""
    compressor = POWERSGD if is_compressed else None
    callbacks = []
    if folder:
        save_freq = "epoch" if batch_size == ROWS else 3
        callbacks.append(keras.callbacks.BackupAndRestore(pathlib.Path(folder), save_freq))
    if interrupt is not None:
        callbacks.append(Interrupt(interrupt))
    with options(strategy, compression=compressor):
        with strategy.scope() if strategy else contextlib.nullcontext():
            layers = [
                keras.layers.Embedding(50, 3, embeddings_initializer="ones"),
                keras.layers.Flatten(),
                keras.layers.Dense(8, "tanh"),
                keras.layers.Dropout(dropout),
                keras.layers.Dense(1),
            ]
            model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
            model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
        fit = dict(batch_size=batch_size, epochs=EPOCHS, shuffle=is_compressed, verbose=0)
        try:
            history = model.fit(x, y, **fit, callbacks=callbacks)
        except Interrupted:
            return {}
    assert not folder or not pathlib.Path(folder, "LATEST").exists()
    assert history.epoch == list(range(EPOCHS)), history.epoch
    return model, {"iterations": model.optimizer.iterations.numpy(), **history.history}


@pytest.mark.extended
def test_asynchronous_training_goes_on_with_fewer_workers(tmp_path):
    # An epoch is a step, which has an order then; Dropout draws on.
    args = {"batch_size": ROWS, "dropout": 0.5}
    run("async22", train, folder=tmp_path / "backup", interrupt=0, **args)
    assert (tmp_path / "backup" / "LATEST").exists()
    resumed = run("async_threads", train, folder=tmp_path / "backup", **args)
    assert_close(resumed.first, run("async_threads", train, **args).first, 1e-6)


@pytest.mark.extended
def test_each_worker_goes_on_with_its_residuals(tmp_path):
    folder = tmp_path / "backup"
    run("sync22", train, folder=folder, interrupt=4, is_compressed=True)
    *_, file = sorted((folder / "compression").iterdir())
    assert file.name.startswith("2-workers-step-"), file
    workers = {name.split("/")[1] for name in worker_state.read(file)}
    assert workers == {"worker-0-of-2", "worker-1-of-2"}
    resumed = run("sync_threads", train, folder=folder, is_compressed=True)
    whole = run("sync_threads", train, is_compressed=True)
    assert_close(resumed.first, whole.first, 1e-6)
