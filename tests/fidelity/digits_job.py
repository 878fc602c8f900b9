"""What `test_real_data.py` runs in a process of its own: a network on the digits, two replicas."""

import json
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import keras_psplus
from keras_psplus.cluster.in_process import logical_devices

ROOT = pathlib.Path(__file__).parents[2]
TEST_SIZE, BATCH_SIZE, EPOCHS = 597, 48, 12


def data():
    with np.load(ROOT / "examples" / "digits.npz") as file:
        x, y = file["x"].astype("float32") / 16, file["y"].astype("int32")
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    return (x[TEST_SIZE:], y[TEST_SIZE:]), (x[:TEST_SIZE], y[:TEST_SIZE])


def train(compression, seed):
    keras.utils.set_random_seed(seed)
    train_data, test_data = data()
    strategy = keras_psplus.MultiWorkerMirroredStrategy(compression=compression)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input(train_data[0].shape[1:]),
                keras.layers.Dense(96, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=25,
        )
    model.fit(*train_data, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0)
    return {
        "replicas": strategy.num_replicas_in_sync,
        "ratio": strategy.communication.ratio,
        "weights": float(sum(np.abs(w).sum() for w in model.get_weights())),
        "accuracy": model.evaluate(*test_data, batch_size=199, verbose=0)[1],
    }


def results_of(compression, seeds):
    """Results with the mean accuracy of all seeds."""
    found = [train(compression, seed) for seed in range(1, 1 + seeds)]
    return found[-1] | {"accuracy": float(np.mean([one["accuracy"] for one in found]))}


if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(1)
    logical_devices(2)
    seeds, *names = sys.argv[1:]
    results = {name: results_of(None if name == "none" else name, int(seeds)) for name in names}
    print("results:", json.dumps(results))
