"""Trains the digits in two stages on two devices, with activations in fewer bytes."""

import pathlib

from tests import quick_start  # noqa: F401

# isort: split
import keras
import numpy as np

import keras_psplus as psp
from keras_psplus.cluster.in_process import logical_devices

DIGITS = pathlib.Path(__file__).resolve().parents[2] / "examples" / "digits.npz"


def main():
    logical_devices(2)
    with np.load(DIGITS) as digits:
        x, y = (digits[name] for name in ("x", "y"))
    x, y = x.astype("float32") / x.max(), y.astype("int32")
    for compression in (None, "bf16", "int8"):
        keras.utils.set_random_seed(7)
        strategy = psp.PipelineStrategy(microbatches=4, activation_compression=compression)
        with strategy.scope():
            stack = [keras.layers.Dense(128, activation="relu") for _ in range(3)]
            model = keras.Sequential([*stack, keras.layers.Dense(10)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"])
        options = {"batch_size": 60, "epochs": 8, "verbose": 0, "shuffle": False}
        history = model.fit(x[:1500], y[:1500], **options).history
        _, accuracy = model.evaluate(x[1500:], y[1500:], batch_size=60, verbose=0)
        print(f"{compression} {history['loss'][-1]:.9f} {accuracy:.5f}", flush=True)


if __name__ == "__main__":
    main()
