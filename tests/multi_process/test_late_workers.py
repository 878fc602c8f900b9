"""A worker that is late at each place of a job in turn: nothing may depend on who is first."""

import pathlib
import tempfile
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.cluster import makes_scope, reference, run
from tests.support.late import LateRate, after
from tests.support.results import assert_close

pytestmark = [pytest.mark.processes, pytest.mark.extended]

SECONDS = 0.12
PLACES = ("forward", "metric", "update", "data", "batch end", "epoch end", "calls")
# One worker alone reads, while the other still updates its weights.
READS = ("weights", "slots", "file")
LATE = "worker-1"


class LateLayer(keras.layers.Layer):
    def __init__(self, seconds, **kwargs):
        super().__init__(**kwargs)
        self.seconds = seconds

    def call(self, x):
        return after(self.seconds, x)

    def get_config(self):
        return {**super().get_config(), "seconds": self.seconds}


class LateError(keras.metrics.MeanAbsoluteError):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(after(self.seconds, y_true), y_pred, sample_weight)


class Looking(keras.callbacks.Callback):
    """Notes logs, is late, and reads on its own what the other worker does not."""

    def __init__(self, place, late, found, reads):
        super().__init__()
        self.place, self.late, self.found, self.reads = place, late, found, reads

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.late("batch end"))
        for name, value in logs.items():
            self.found.setdefault(f"batch/{name}", []).append(value)
        values = {"weights": self.model.weights, "slots": self.model.optimizer.variables[2:]}
        if self.reads and self.place in values:
            read = [np.ravel(one.numpy()) for one in values[self.place]]
            self.found.setdefault("own/read", []).append(np.concatenate(read))

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(2 * self.late("epoch end"))
        if self.reads and self.place == "file":
            with tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder, "model.keras")
                self.model.save(path)
                classes = {"LateLayer": LateLayer}
                model = keras.models.load_model(path, classes, compile=False)
            read = [np.ravel(value) for value in model.get_weights()]
            self.found.setdefault("own/read", []).append(np.concatenate(read))


def dense(units, activation=None):
    initializer = keras.initializers.GlorotUniform(units)
    return keras.layers.Dense(units, activation, kernel_initializer=initializer)


@makes_scope
def job(scope, place, name):
    with scope():
        task = getattr(getattr(tf.distribute.get_strategy(), "task", None), "name", "")

        def late(at):
            return SECONDS if at == place and task == LATE else 0.0

        model = keras.Sequential(
            [
                *(keras.Input((6,)), dense(8, "tanh"), LateLayer(late("forward"))),
                *(dense(6, "tanh"), dense(2)),
            ]
        )
        rate = LateRate(SECONDS if place in READS and task == "worker-0" else late("update"))
        optimizer = keras.optimizers.Muon(rate)
        if name == "adam":
            optimizer = keras.optimizers.Adam(rate, global_clipnorm=0.1, use_ema=True)
        model.compile(optimizer, "mse", metrics=[LateError(late("metric"))])
    x = np.random.default_rng(0).normal(size=(22, 6)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(8)
    data = data.map(lambda x, y: (after(late("data"), x), y))
    found = {}
    callbacks = [Looking(place, late, found, task in (LATE, ""))]
    if name == "adam":
        callbacks.append(keras.callbacks.SwapEMAWeights(swap_on_epoch=True))
    model.fit(data, epochs=2, verbose=0, callbacks=callbacks, validation_data=data)
    time.sleep(2 * late("calls"))
    found["predict"] = model.predict(x, batch_size=8, verbose=0)
    time.sleep(2 * late("calls"))
    model.set_weights([0.5 * weight for weight in model.get_weights()])
    time.sleep(2 * late("calls"))
    found["evaluate"] = model.evaluate(data, verbose=0)
    return model, found


@pytest.mark.parametrize(
    "layout, place, name",
    [
        *(("all2", one, ("muon", "adam")[i % 2]) for i, one in enumerate((*PLACES, *READS))),
        *(("tp4_all", "forward", "adam"), ("tp4_all", "weights", "adam")),
        ("tp4_all", "update", "muon"),
    ],
)
def test_a_late_worker(layout, place, name):
    results = run(layout, job, place=place, name=name, same=place not in READS)
    expected = reference(job, place=place, name=name)
    found = {what: results.first[what] for what in expected if not what.startswith("own")}
    found |= {what: value for what, value in results[LATE].items() if what.startswith("own")}
    assert len(found) == len(expected) and ("own/read" in found) == (place in READS)
    assert_close(found, expected, 1e-4)
