"""Compressed training by several workers: `test_compression.py` says what they must come to."""

import io
import os
from concurrent import futures
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from keras_psplus import compression
from keras_psplus.compression import outer_products
from tests.support.parts import resumed, swapped

STEPS = 6
# Of each route one.
COMPRESSORS = {
    "bf16": "bf16",
    # The rows that each worker sums: not of whole blocks, and, by variable, of whole ones.
    "int8": compression.Int8(block_size=32),
    "topk": compression.TopK(0.2),
    "topk_momentum": compression.TopK(0.2, momentum_correction=0.5),
    "powersgd": compression.PowerSGD(2, min_compression_rate=1),
    "by_variable": {"*kernel": compression.Int8(block_size=16)},
}


def compressing(compressor, bucket_bytes=3000):
    """A block in which the strategy compresses, on the second worker without native kernels.

    Workers with these kernels and without compute the same bits.
    """
    if tf.distribute.get_strategy().task.task_index == 1:
        os.environ["KERAS_PSPLUS_NATIVE"] = "0"
    return swapped(compression=COMPRESSORS.get(compressor, compressor), bucket_bytes=bucket_bytes)


def problem():
    """A linear model, so that gradients can be worked out by hand, and `STEPS` batches."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(8 * STEPS, size)).astype("float32") for size in (9, 120))
    return x, y


def linear(optimizer, **kwargs):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((9,)), keras.layers.Dense(120, name="linear")])
    model.compile(optimizer, "mse", **kwargs)
    return model


def fit(model, data=None, epochs=1, callbacks=(), **kwargs):
    x, y = data or problem()
    options = {"epochs": epochs, "callbacks": list(callbacks), "shuffle": False, "verbose": 0}
    model.fit(x, y, 8, **options, **kwargs)


def weights(name, model):
    return {f"{name}/{i}": weight for i, weight in enumerate(model.get_weights())}


def compressed(name):
    with compressing(name) as strategy:
        model = linear(keras.optimizers.SGD(0.5))
        fit(model)
        assert strategy.communication.seconds > 0
        assert "linear/kernel" in strategy.communication.summary()
        return model, {
            t.path.split("/")[-1]: (t.logical_bytes, t.compressed_bytes, t.wire_bytes)
            for t in strategy.communication.traffic()
        }


def interrupted(name):
    """Interrupted and started again, also where one worker's file is lost; and as a whole."""

    def train(*callbacks):
        with compressing(name):
            model = linear(keras.optimizers.SGD(0.1))
            fit(model, epochs=4, callbacks=callbacks)
            return model

    def check(folder, loses=False):
        files = list((folder / "compression").iterdir())
        assert files
        assert all("-of-2-with-2-replicas-step-" in file.name for file in files), files
        if loses and tf.distribute.get_strategy().task.task_index == 1:
            for file in files:
                file.unlink()

    found = weights("whole", train())
    found |= weights("resumed", resumed(train, 3, save_freq=4, changes=check))
    if name == "powersgd":
        lost = resumed(train, 3, save_freq=4, changes=lambda folder: check(folder, loses=True))
        found |= weights("lost", lost)
    return found


def by_hand():
    """Training goes on from a checkpoint of the script's own, which other trainings refuse."""

    def train(first, last, loaded=None):
        model = linear(keras.optimizers.SGD(0.1))
        if loaded:
            model.set_weights(loaded[0])
            with np.load(io.BytesIO(loaded[1])) as state:
                strategy.load_state_dict(model.optimizer, state)
        fit(model, epochs=last, initial_epoch=first)
        return model

    def error_of(optimizer, state, model=None):
        try:
            strategy.load_state_dict(optimizer, state)
            if model is not None:
                fit(model)
        except ValueError as error:
            return str(error)

    with compressing("sign") as strategy:
        model, file = train(0, 2), io.BytesIO()
        state = strategy.state_dict(model.optimizer)
        np.savez(file, **state)
        found = weights("resumed", train(2, 4, (model.get_weights(), file.getvalue())))
        found |= weights("whole", train(0, 4))
        others = {
            name.replace(f"-{own}-of-", f"-{1 - own}-of-"): array
            for own in (0, 1)
            for name, array in state.items()
            if f"-{own}-of-" in name
        }
        assert "Each worker loads what" in error_of(model.optimizer, others)
        fewer = {name.replace("-of-2/", "-of-3/"): array for name, array in state.items()}
        assert "the state is one of 3 replicas, and there are 2" in error_of(model.optimizer, fewer)
        assert "it has nothing for gradient/" in error_of(model.optimizer, {})
        # A thread begins outside of the strategy's scope.
        with futures.ThreadPoolExecutor() as pool:
            outside = pool.submit(keras.optimizers.SGD, 0.1).result()
        assert "scope" in error_of(outside, state)
    # Before the first step, which finds that the state is one of another compressor.
    with compressing("powersgd:1") as strategy:
        model = linear(keras.optimizers.SGD(0.1))
        error = error_of(model.optimizer, state, model)
    assert "it comes from another model, compressor or" in error, error
    return found


def not_finite(name, scaled):
    """A row that is not a number, on one worker: a scaled loss skips the step, plain SGD has it."""
    x, y = problem()
    x[8 * 2, 3] = np.inf
    with compressing(name):
        optimizer = keras.optimizers.SGD(0.1)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0)
        model = linear(optimizer)
        fit(model, (x, y))
        return model, {}


# What its clipping does to rows depends on whether they come one by one.
EMBEDDINGS = {
    "none": (None, {}),
    "repeated": (None, {"clipvalue": 1e9}),
    "int8": ("int8", {}),
}


def embeddings(kind):
    rng = np.random.default_rng(3)
    ids, y = rng.integers(0, 50, size=(48, 4)), rng.normal(size=(48, 1)).astype("float32")
    compressor, clip = EMBEDDINGS[kind]
    layers = [
        keras.Input((4,), dtype="int32"),
        keras.layers.Embedding(50, 6, name="table"),
        keras.layers.Flatten(),
        keras.layers.Dense(1),
    ]
    with compressing(compressor) as strategy:
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.5, **clip), "mse")
        # The last batch has fewer rows on one worker than on the other.
        fit(model, (ids[:43], y[:43]))
        (table,) = (t for t in strategy.communication.traffic() if "table" in t.path)
        return model, {"own bytes": (table.logical_bytes, table.compressed_bytes)}


def accumulated(name):
    """Sums in branches and loops."""
    with compressing(name) as strategy:
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        fit(linear(optimizer, steps_per_execution=2), epochs=2)
        return {"sent": strategy.communication.logical_bytes}


def pieces(bucket_bytes):
    """A gradient that is cut, or not, between blocks that the whole one has as well."""
    x, y = problem()
    with compressing(compression.Int8(block_size=16), bucket_bytes) as strategy:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(128, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.5), "mse")
        fit(model, (x[:, :8], np.pad(y, [[0, 0], [0, 8]])))
        return model, {"sent": strategy.communication.wire_bytes}


class Nothing(keras.layers.Layer):
    """Has a variable of no elements."""

    def build(self, shape):
        self.nothing = self.add_weight(shape=(0, 3), initializer="ones", name="nothing")

    def call(self, inputs):
        return inputs + keras.ops.sum(self.nothing)


def towers(names):
    """Two parts of a model, each with a layer of one of these names."""
    with compressing(compression.TopK(0.1)):
        parts = []
        for i, name in enumerate(names):
            inputs = keras.Input((9,))
            outputs = keras.layers.Dense(120, name=name)(inputs)
            parts.append(keras.Model(inputs, outputs, name=f"tower_{i}"))
        inputs = keras.Input((9,))
        outputs = keras.layers.add([part(Nothing()(inputs)) for part in parts])
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        fit(model)
        return model, {}


class MadeWhole(keras.layers.Dense):
    """A layer with a kernel whose gradient is no product, for the graph."""

    def call(self, inputs):
        return keras.ops.relu(keras.ops.matmul(inputs, 1.0 * self.kernel) + self.bias)


def two_layers(layer, sizes, rate):
    """A model and data for it: thin products, and in the last batch no rows on one worker."""
    rng = np.random.default_rng(4)
    data = rng.normal(size=(49, 64)), rng.normal(size=(49, 1))
    names = zip(("first", "second"), sizes)
    layers = [layer(size, activation="relu", name=name) for name, size in names]
    last = keras.layers.Dense(1, name="last")
    model = keras.Sequential([keras.Input((64,)), *layers, last])
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model, data


def wide(made_whole):
    """Gradients that are thin products."""
    layer = MadeWhole if made_whole else keras.layers.Dense
    make = outer_products.MatrixPlusOuterProduct
    with (
        compressing(compression.PowerSGD(2)) as strategy,
        mock.patch.object(make, "__init__", autospec=True, side_effect=make.__init__) as made,
    ):
        model, data = two_layers(layer, (96, 80), 0.1)
        fit(model, data, epochs=2)
        sent = strategy.communication.compressed_bytes
        return model, {"sent": sent, "sums": made.call_count}


FACTORS = {
    "none": (None, keras.layers.Dense),
    "all": ("factors", keras.layers.Dense),
    "of halves": ("factors:bf16", keras.layers.Dense),
    "of half no products": ("factors:fp16", MadeWhole),
}


def factors(kind):
    """Steps of few rows, and of too many; bytes sent of each variable, and how."""
    compressor, layer = FACTORS[kind]
    rng = np.random.default_rng(4)
    many = rng.normal(size=(400, 64)), rng.normal(size=(400, 1))
    with compressing(compressor) as strategy:
        model, data = two_layers(layer, (96, 95), 0.05)
        fit(model, data, epochs=2)
        sent = {
            t.path: (t.compressed_bytes, t.wire_bytes) for t in strategy.communication.traffic()
        }
        model.fit(*many, 200, shuffle=False, verbose=0)
        found = {}
        for t in strategy.communication.traffic():
            path = t.path.split("/", 1)[1]
            found[f"how {path}"] = str(t.compressor)
            found[f"own bytes {path}"] = (*sent[t.path], t.compressed_bytes)
        return model, found
