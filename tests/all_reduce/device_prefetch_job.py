"""Fits whose batches are copied to their devices ahead, as on GPUs, and others."""

import argparse
import json
import pathlib

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus
from keras_psplus.all_reduce.data import device_prefetch
from keras_psplus.all_reduce.extended import MultiWorkerMirroredExtended
from keras_psplus.cluster.in_process import logical_devices

# The last batch has one row, and most replicas have none.
ROWS, BATCH = 25, 8


def data(kind):
    x = np.random.default_rng(0).normal(size=(ROWS, 5)).astype("float32")
    y = x.sum(1, keepdims=True)
    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH}
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=1).batch(BATCH)}


def fit(strategy, kind, **arguments):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **arguments)
    logs = model.fit(**data(kind), epochs=2, verbose=0).history
    values = model.evaluate(**data(kind), verbose=0, return_dict=True)
    return logs, values, [weights.tolist() for weights in model.get_weights()]


def main(path):
    logical_devices(2)
    strategy = keras_psplus.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 4
    distributed, on_devices = [], device_prefetch.on_devices

    def note(*args):
        distributed.append(on_devices(*args))
        return distributed[-1]

    device_prefetch.on_devices = note
    results = {}
    for ahead in False, True:
        MultiWorkerMirroredExtended.fetches_to_devices = ahead
        for kind in "arrays", "dataset":
            results[f"{kind} {ahead}"] = fit(strategy, kind)
        results[f"several {ahead}"] = fit(strategy, "arrays", steps_per_execution=2)
    # Not where several steps are one call.
    assert len(distributed) == 4
    batch = strategy.experimental_local_results(next(iter(distributed[0])))
    devices = [part.data[0].device for part in batch]
    assert devices == list(strategy.extended.worker_devices), devices
    if strategy.is_chief:
        pathlib.Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    main(parser.parse_args().path)
