"""Models, data and a registry for cases that must leave what one process leaves."""

import keras
import numpy as np

CASES = {}


def case(function):
    """Registers a function that trains and returns `(model, results)`."""
    CASES[function.__name__] = function
    return function


def blobs(rows=203, features=12, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, rows).astype("int32")
    x = rng.normal(size=(rows, features)).astype("float32") + y[:, None] * 0.5
    return x, y


def tokens(rows=83, length=7, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 30, (rows, length)).astype("int32"), rng.integers(0, 3, rows)


def compiled(layers, optimizer="sgd", loss=None, metrics=("accuracy",), **kwargs):
    model = keras.Sequential(layers)
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=list(metrics), **kwargs)
    return model


def mlp(optimizer=None, **kwargs):
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4)]
    return compiled(layers, optimizer or keras.optimizers.SGD(0.1), **kwargs)


def fit(model, *args, **kwargs):
    kwargs.setdefault("verbose", 0)
    history = model.fit(*args, **kwargs)
    return {f"history/{k}": np.asarray(v) for k, v in history.history.items()}


def trained(model, *args, **kwargs):
    return model, fit(model, *args, **kwargs)


def numpy_defaults(**kwargs):
    return dict(batch_size=50, epochs=2, shuffle=False) | kwargs
