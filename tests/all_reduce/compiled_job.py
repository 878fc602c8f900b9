"""Two replicas in one process whose models' calls are compiled, beside one compiled process."""

import contextlib
import json
import sys

from tests import quick_start, references  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

import keras_psplus
from keras_psplus.all_reduce.engine import AllReduceEngine
from keras_psplus.cluster.in_process import logical_devices
from keras_psplus.core.graph import compiled_calls

layers = keras.layers


def dense():
    """Masks, losses that a layer adds, weights' losses, dropout that drops nothing."""
    tokens = keras.Input((6,), dtype="int32")
    h = layers.Embedding(20, 8, mask_zero=True)(tokens)
    h = layers.MultiHeadAttention(2, 4)(h, h)
    h = layers.GlobalAveragePooling1D()(layers.Dropout(0.0)(h))
    h = layers.Dense(8, "relu", kernel_regularizer="l2", activity_regularizer="l1")(h)
    return keras.Model(tokens, {"a": layers.Dense(3)(h), "b": layers.Dense(2)(h)})


def recurrent():
    """A loop in the middle of what can be compiled, and words before it."""
    words = keras.Input((6,), dtype="string")
    h = layers.Embedding(20, 8)(layers.Hashing(20)(words))
    h = layers.LSTM(4)(layers.Dense(6, "tanh", activity_regularizer="l1")(h))
    h = layers.Concatenate()([h, layers.Dense(2)(h)])
    return keras.Model(words, {"a": layers.Dense(3)(h), "b": layers.Dense(2)(h)})


def noisy():
    """Random numbers and averages, which layers keep in variables, and losses that they add."""
    inputs = h = keras.Input((5,))
    for _ in range(3):
        # A bias would have no gradient but rounding, which Adam scales up.
        h = layers.Dense(8, use_bias=False, activity_regularizer="l1")(h)
        h = layers.BatchNormalization()(h)
        h = layers.GaussianNoise(0.1)(layers.Dropout(0.5)(layers.Activation("relu")(h)))
    return keras.Model(inputs, {"a": layers.Dense(3)(h), "b": layers.Dense(2)(h)})


class Pair(keras.Model):
    """A model of two models, which are called by its step; it has no call itself."""

    def __init__(self):
        super().__init__()
        self.first = keras.Sequential([keras.Input((5,)), layers.Dense(7, "tanh")])
        self.second = keras.Sequential([keras.Input((7,)), layers.Dense(1)])
        self.built = True

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self.second(self.first(x)) - y) ** 2)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        return {"loss": loss}


COUNTS = []
_check = compiled_calls.CompiledCalls.check


def note_count(self):
    COUNTS.append(self.count)
    _check(self)


compiled_calls.CompiledCalls.check = note_count


def data_of(name):
    random = np.random.default_rng(0)
    # The last batch is shorter; XLA compiles once more for each other number of rows.
    rows = 20 if name == "dense" else 16
    if name == "pair":
        return random.normal(size=(rows, 5)).astype("f"), random.normal(size=(rows, 1)).astype("f")
    x = random.integers(0, 20, (rows, 6))
    if name == "noisy":
        x = random.normal(size=(rows, 5)).astype("f")
    if name == "recurrent":
        x = tf.strings.as_string(x)
    return x, {"a": random.integers(0, 3, rows), "b": random.normal(size=(rows, 2)).astype("f")}


def trained(name, jit_compile, context):
    keras.utils.set_random_seed(1)
    with context:
        makers = {"dense": dense, "noisy": noisy, "pair": Pair, "recurrent": recurrent}
        model = makers[name]()
        losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"
        arguments = {"loss": dict(zip("ab", losses)), "metrics": {"a": ["accuracy"]}}
        if name == "pair":
            arguments = {}
        model.compile(keras.optimizers.Adam(0.01), jit_compile=jit_compile, **arguments)
        x, y = data_of(name)
        logs = dict(model.fit(x, y, 8, epochs=2, shuffle=False, verbose=0).history)
        if name == "dense":
            logs |= {
                f"val_{k}": [v] for k, v in model.evaluate(x, y, 8, 0, return_dict=True).items()
            }
            logs["outputs"] = [float(np.abs(o).sum()) for o in model.predict(x, 8, 0).values()]
    return {"logs": logs, "weights": [w.tolist() for w in model.get_weights()]}


def refused(make):
    strategy = keras_psplus.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = make()
        model.compile("sgd", "mse", jit_compile=True)
    try:
        model.fit(np.ones((8, 4)), np.ones((8, 1)), 4, verbose=0)
    except ValueError as error:
        return str(error)
    return None


def main(path):
    references.build_first()
    logical_devices(2)
    strategy = keras_psplus.MultiWorkerMirroredStrategy()
    assert strategy.num_replicas_in_sync == 2
    out = {}
    for name in ("dense", "pair", "recurrent"):
        COUNTS.clear()
        jit_compile = True
        if name == "pair":
            jit_compile, AllReduceEngine.compiles_by_default = "auto", True  # as on GPUs
        out[name] = trained(name, jit_compile, strategy.scope())
        out[f"{name} calls"] = COUNTS[-1]
        alone = contextlib.ExitStack()
        alone.enter_context(keras_psplus.single_process())
        out[f"{name} alone"] = trained(name, name != "recurrent", alone)
    AllReduceEngine.compiles_by_default = False
    out["noisy"] = trained("noisy", True, strategy.scope())
    parts = keras_psplus.MultiWorkerMirroredStrategy(jit_blocks=4)
    for name in ("noisy", "recurrent"):
        COUNTS.clear()
        out[f"{name} in parts"] = trained(name, "auto", parts.scope())
        out[f"{name} in parts calls"] = COUNTS[-1]
    out["loop"] = refused(
        lambda: keras.Sequential([keras.Input((4,)), layers.Reshape((4, 1)), layers.SimpleRNN(1)])
    )
    with open(path, "w") as file:
        json.dump(out, file)


if __name__ == "__main__":
    main(sys.argv[1])
