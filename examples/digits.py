"""Learns to read handwritten digits: one script for one process or a whole cluster.

    python examples/digits.py
    keras-psplus run --workers 2 examples/digits.py

The data are scikit-learn's digits (1,797 scans of 8 x 8 pixels), which lie beside this file.
Nothing here depends on how the model is trained: `psp.strategy_from_env()` is the strategy that
the launcher was given.
"""

import argparse
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp


def load_data(seed=0, test_size=360):
    """Returns (x_train, y_train), (x_test, y_test); images as float32 in [0, 1]."""
    with np.load(pathlib.Path(__file__).with_name("digits.npz")) as file:
        x = file["x"].reshape(-1, 8, 8, 1).astype("float32") / 16
        y = file["y"].astype("int32")
    order = np.random.default_rng(seed).permutation(len(x))
    test, train = order[:test_size], order[test_size:]
    return (x[train], y[train]), (x[test], y[test])


def build_model():
    """A small convolutional network: 261,000 weights, so 1 MB of gradients each step."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(128, 3, padding="same", activation="relu"),
            layers.Conv2D(128, 3, padding="same", activation="relu"),
            layers.GlobalMaxPooling2D(),
            layers.Dense(10),
        ]
    )


class Stopwatch(keras.callbacks.Callback):
    """Times the training, with and without the first epoch, in which functions are traced."""

    def on_train_begin(self, logs=None):
        self.begin = time.perf_counter()
        self.epoch_ends = []

    def on_epoch_end(self, epoch, logs=None):
        self.epoch_ends.append(time.perf_counter())

    @property
    def seconds(self):
        return self.epoch_ends[-1] - self.begin

    @property
    def after_first_epoch(self):
        return self.epoch_ends[-1] - self.epoch_ends[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch_size", type=int, default=128, help="of all workers together")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    (x_train, y_train), (x_test, y_test) = load_data()

    strategy = psp.strategy_from_env()
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.Adam(1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    # With a seed, all runs have the same batches. Keras's own shuffle of arrays is another one in
    # each kind of job, and so are the losses then.
    train = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    train = train.shuffle(len(x_train), seed=args.seed).batch(args.batch_size)

    is_chief = getattr(strategy, "is_chief", True)
    stopwatch = Stopwatch()
    history = model.fit(
        train,
        epochs=args.epochs,
        validation_data=(x_test, y_test),
        callbacks=[stopwatch],
        verbose=1 if is_chief else 0,
    )
    accuracy = model.evaluate(x_test, y_test, verbose=0, return_dict=True)["accuracy"]

    if is_chief:
        print(f"test accuracy {accuracy:.3f} after {args.epochs} epochs")
        # For programs that read this output, such as demo.py and the tests.
        print("digits: losses", *(f"{loss:.6f}" for loss in history.history["loss"]))
        print(
            f"digits: accuracy={accuracy:.4f} seconds={stopwatch.seconds:.2f}"
            f" after_first_epoch={stopwatch.after_first_epoch:.2f}"
            f" workers={getattr(strategy, 'num_workers', 1)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
