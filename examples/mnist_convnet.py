"""Keras's tutorial "Simple MNIST convnet", trained by whichever strategy the launcher was given.

    python examples/mnist_convnet.py
    keras-psplus run --workers 2 examples/mnist_convnet.py

The model, the optimizer and the batch size are the tutorial's
(https://keras.io/examples/vision/mnist_convnet/). MNIST itself has to be downloaded; what lies
beside this file are scikit-learn's digits, 1,797 scans of 8 x 8 pixels, which are made as large as
MNIST's here. `--data mnist.npz` takes Keras's own file instead, which `keras.datasets.mnist` keeps
in ~/.keras/datasets.
"""

import argparse
import json
import pathlib
import time

import keras
import numpy as np

import keras_psplus as psp

CLASSES = 10


def load_data(file=None):
    """Returns (x_train, y_train), (x_test, y_test): images of 28 x 28 in [0, 1], and one-hot."""
    if file is not None:
        with np.load(file) as data:
            parts = [(data[f"x_{part}"] / 255, data[f"y_{part}"]) for part in ("train", "test")]
    else:
        with np.load(pathlib.Path(__file__).with_name("digits.npz")) as data:
            x, y = data["x"].reshape(-1, 8, 8) / 16, data["y"]
        # Three pixels for each, and a border of two.
        x = np.pad(x.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2)))
        order = np.random.default_rng(0).permutation(len(x))
        parts = [(x[rows], y[rows]) for rows in (order[360:], order[:360])]
    return [
        (x[..., np.newaxis].astype("float32"), keras.utils.to_categorical(y, CLASSES))
        for x, y in parts
    ]


def build_model(dropout):
    """The tutorial's model, of 34,826 weights."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, kernel_size=(3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Conv2D(64, kernel_size=(3, 3), activation="relu"),
            layers.MaxPooling2D(pool_size=(2, 2)),
            layers.Flatten(),
            layers.Dropout(dropout),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="an mnist.npz; by default, the digits beside this file")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch_size", type=int, default=128, help="of all workers together")
    # Each replica draws units of its own; with 0, all strategies give the same result.
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--train_size", type=int, help="images to train on; by default, all")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    keras.utils.set_random_seed(args.seed)
    (x_train, y_train), (x_test, y_test) = load_data(args.data)
    x_train, y_train = x_train[: args.train_size], y_train[: args.train_size]

    strategy = psp.strategy_from_env()
    with strategy.scope():
        model = build_model(args.dropout)
        model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])

    is_chief = getattr(strategy, "is_chief", True)
    begin = time.perf_counter()
    history = model.fit(
        x_train,
        y_train,
        batch_size=args.batch_size,
        epochs=args.epochs,
        validation_split=0.1,
        shuffle=False,  # They are in random order, which is thus the same in all clusters.
        verbose=2 if is_chief else 0,
    ).history
    seconds = time.perf_counter() - begin
    score = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
    if is_chief:
        print(f"Test loss: {score['loss']:.4f}, test accuracy: {score['accuracy']:.4f}")
        # For programs that read this output, such as the tests.
        result = {"test": score, "seconds": round(seconds, 2), **history}
        print("mnist_convnet:", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
