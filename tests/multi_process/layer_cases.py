"""Cases of layers: their states, masks, tables and types of numbers."""

import keras
import numpy as np
import tensorflow as tf

from tests.multi_process.case_models import (
    blobs,
    case,
    compiled,
    fit,
    numpy_defaults,
    tokens,
    trained,
)


@case
def regularizers_and_constraint():
    layers = [
        keras.layers.Reshape((3, 4, 1)),
        keras.layers.Conv2D(4, 2, kernel_regularizer="l2", activity_regularizer="l1"),
        keras.layers.Flatten(),
        keras.layers.Dense(4, kernel_constraint=keras.constraints.MaxNorm(0.5)),
    ]
    return trained(compiled(layers, keras.optimizers.SGD(0.05)), *blobs(), **numpy_defaults())


class Centred(keras.layers.Layer):
    """Rows without the mean of those of all replicas, as contrastive losses gather them."""

    def call(self, x):
        context = tf.distribute.get_replica_context()
        everything = x if context is None else context.all_gather(x, axis=0)
        return x - 0.5 * tf.reduce_mean(everything, 0)


class NormalisedByMask(keras.layers.BatchNormalization):
    """Takes the statistics of the places that a mask leaves, more of them on some replicas."""

    def call(self, x, training=None):
        return super().call(x, training=training, mask=x[..., 0] > 0)


def convolutional(synchronized, **kwargs):
    layers = [
        keras.layers.Reshape((3, 4, 1)),
        keras.layers.Conv2D(4, 2, activation="relu"),
        keras.layers.BatchNormalization(synchronized=synchronized, momentum=0.8),
        *([NormalisedByMask(synchronized=True, momentum=0.8)] if synchronized else []),
        keras.layers.Flatten(),
        *([Centred()] if synchronized else []),
        keras.layers.Dense(4),
    ]
    return compiled(layers, keras.optimizers.SGD(0.05, momentum=0.5), **kwargs)


@case
def synchronised_batch_normalisation():
    """Of convolutions, whose kernel does not know what to make of a replica without rows."""
    model = convolutional(synchronized=True)
    x, y = blobs(17)
    options = numpy_defaults(batch_size=8, validation_data=(x[:9], y[:9]))
    results = fit(model, x, y, **options)
    results["predicted"] = model.predict(x, batch_size=8, verbose=0)
    return model, results


@case
def convolutions_of_single_rows():
    """Statistics are of one row in one process, too."""
    data = tf.data.Dataset.from_tensor_slices(blobs(3)).batch(1)
    model, results = trained(convolutional(synchronized=False), data, epochs=2)
    return model, results | {"evaluated": np.asarray(model.evaluate(data, verbose=0))}


@case
def embeddings_of_several_widths():
    inputs = keras.Input((7,), dtype="int32")
    tables = [keras.layers.Embedding(30, width)(inputs) for width in (3, 5, 7)]
    h = keras.layers.GlobalAveragePooling1D()(keras.layers.Concatenate()(tables))
    outputs = {"a": keras.layers.Dense(3, name="a")(h), "b": keras.layers.Dense(5, name="b")(h)}
    model = keras.Model(inputs, outputs)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), {"a": losses, "b": losses})
    x, y = tokens(81)  # The last batch has one row, and some replica none.
    model, results = trained(model, x, {"a": y, "b": y}, **numpy_defaults(batch_size=20))
    predicted = model.predict(x, batch_size=20, verbose=0)
    return model, results | {f"predict/{name}": value for name, value in predicted.items()}


class Positions(keras.layers.Layer):
    """Adds rows for the places of tokens, and mixes tokens by rows for their distances."""

    def build(self, shape):
        tables = (keras.layers.Embedding(7, shape[-1]) for _ in range(3))
        self.places, self.distances, self.buckets = tables
        self.between = np.abs(np.arange(7)[:, None] - np.arange(7))

    def call(self, x):
        size = keras.ops.shape(x)[1]
        places = keras.ops.arange(size)
        buckets = keras.ops.minimum(keras.ops.abs(places[:, None] - places), 3)
        weights = self.distances(self.between)[:size, :size] + self.buckets(buckets)
        return keras.ops.einsum("ijd,bjd->bid", weights, x) + self.places(places)


@case
def positions_of_tokens():
    """Looked up once for a batch in one process, as Adam's squares of rows show."""
    layers = [keras.layers.Embedding(30, 6), Positions(), keras.layers.GlobalAveragePooling1D()]
    model = compiled([*layers, keras.layers.Dense(3)], keras.optimizers.Adam(0.01))
    data = tf.data.Dataset.from_tensor_slices(tokens(41)).batch(20)
    # Batches of other lengths than one another; the last one has one row.
    data = data.map(lambda x, y: (x[:, : 7 - tf.shape(x)[0] % 2], y))
    return trained(model, data, epochs=2)


@case
def masked_sequence_loss():
    x, _ = tokens()
    x[:, 3:][np.random.default_rng(1).uniform(size=(len(x), 4)) < 0.6] = 0
    layers = [
        keras.layers.Embedding(30, 8, mask_zero=True),
        keras.layers.LSTM(8, return_sequences=True),
        keras.layers.Dense(30),
    ]
    return trained(
        compiled(layers, keras.optimizers.SGD(0.2)),
        x,
        (x + 1) % 30,
        **numpy_defaults(batch_size=20),
    )


@case
def several_inputs_and_outputs():
    a, b = keras.Input((12,), name="a"), keras.Input((12,), name="b")
    h = keras.layers.Dense(8, activation="relu")(keras.layers.Concatenate()([a, b]))
    model = keras.Model(
        {"a": a, "b": b},
        {"u": keras.layers.Dense(4, name="u")(h), "v": keras.layers.Dense(1, name="v")(h)},
    )
    model.compile(
        "sgd",
        {"u": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "v": "mse"},
        loss_weights={"u": 1.0, "v": 0.3},
        metrics={"u": ["accuracy"], "v": ["mae"]},
    )
    x, y = blobs()
    targets = {"u": y, "v": y.astype("float32")[:, None]}
    return trained(model, {"a": x, "b": x[:, ::-1]}, targets, **numpy_defaults())


@case
def mixed_precision_skips_overflow():
    layers = [
        keras.layers.Dense(16, activation="relu", dtype="mixed_float16"),
        keras.layers.Dense(4, dtype="float32"),
    ]
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**8)
    model = compiled(layers, optimizer)
    x, y = blobs(200)
    x[120] = np.inf  # in the third batch, and in one worker's half of it
    model, results = trained(model, x, y, **numpy_defaults(epochs=1))
    scale = np.asarray(optimizer.dynamic_scale)
    return model, {"scale": scale, "iterations": np.asarray(optimizer.inner_optimizer.iterations)}


@case
def float8():
    """Scales and histories are those of the whole batch, and the same on all workers."""
    layers = [keras.Input((12,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(4)]
    model = keras.Sequential(layers)
    model.quantize("float8")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss)
    return trained(model, *blobs(101), **numpy_defaults(epochs=3))


@case
def bfloat16():
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4)]
    for layer in layers:
        layer.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
    model = compiled(layers, keras.optimizers.SGD(0.1))
    model, _ = trained(model, *blobs(200), **numpy_defaults(epochs=1))
    return None, {"predictions": model.predict(blobs(33)[0], verbose=0).astype("float32")}


@case
def much_at_once():
    """An embedding, L2, Adam with a schedule and clipping, sample weights, several steps a call."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.8)
    layers = [
        keras.layers.Embedding(30, 8),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(16, activation="relu", kernel_regularizer="l2"),
        keras.layers.Dense(3),
    ]
    optimizer = keras.optimizers.Adam(schedule, global_clipnorm=0.5)
    model = compiled(layers, optimizer, metrics=("accuracy",), steps_per_execution=2)
    weights = np.random.default_rng(5).uniform(0, 2, 83).astype("float32")
    options = numpy_defaults(batch_size=20, sample_weight=weights)
    return trained(model, *tokens(), **options, validation_data=tokens(31, seed=2))


@case
def run_eagerly():
    layers = [
        keras.layers.Reshape((3, 4, 1)),
        keras.layers.Conv2D(4, 2, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dense(4),
    ]
    model = compiled(layers, keras.optimizers.SGD(0.1), run_eagerly=True)
    return trained(model, *blobs(rows=101), **numpy_defaults(epochs=1))
