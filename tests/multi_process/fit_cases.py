"""Ways of training that must equal one process on the same global batches.

fit_cases.py FOLDER KIND=CASE,CASE... [KIND=CASE,CASE...]

Each KIND is a way of running cases, one after the other in this process: see `strategies`. `CASE`s
that are left out are all. What each case returns, and the final weights, is written to
`<folder>/<kind>/<case>.<task>.npz`.
"""

import os
import pathlib
import random
import sys
import typing

from tests import quick_start, references  # noqa: F401

# isort: split
import keras
import numpy as np
import tensorflow as tf

CASES = {}


def case(function):
    """Registers a case: a function that trains and returns `(model, results)`."""
    CASES[function.__name__] = function
    return function


def asynchronous_case(function):
    """Registers a case of what one asynchronous worker does, but several replicas do not."""
    return case(function)


def blobs(rows=203, features=12, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, rows).astype("int32")
    x = rng.normal(size=(rows, features)).astype("float32") + y[:, None] * 0.5
    return x, y


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


@case
def last_batch_of_one_row():
    """And random numbers after it, of which layers of the next model would have their seeds."""
    model, results = trained(mlp(), *blobs(rows=101), **numpy_defaults())
    drawn = random.random(), np.random.rand(), tf.random.uniform([]).numpy()
    return model, results | {"drawn": np.array(drawn)}


@case
def class_weight_and_validation_split():
    model = mlp(weighted_metrics=["sparse_categorical_crossentropy"])
    weights = {0: 1.0, 1: 2.0, 2: 0.5, 3: 1.5}
    options = numpy_defaults(class_weight=weights, validation_split=0.3, validation_freq=2)
    return trained(model, *blobs(), **options)


@case
def steps_per_execution():
    """Of a dataset, and in `predict` of arrays."""
    data = tf.data.Dataset.from_tensor_slices(blobs()).batch(50)
    model, results = trained(mlp(steps_per_execution=4), data, epochs=2)
    return model, results | {"predict": model.predict(blobs()[0], batch_size=40, verbose=0)}


@case
def dataset_of_unknown_length():
    """A step that finds no data is not counted, as plain Keras does not in several steps a call."""
    data = tf.data.Dataset.from_tensor_slices(blobs()).filter(lambda x, y: True).batch(50)
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))
    is_plain = not hasattr(tf.distribute.get_strategy(), "engine")
    model, results = trained(
        mlp(optimizer, steps_per_execution=5 if is_plain else 1), data, epochs=2
    )
    assert int(optimizer.iterations) == 10
    return model, results


@case
def maps_of_own_rows():
    """Each worker maps only its own rows; shuffled, weighted, of unknown length, in `predict`."""

    def centred(x, y):
        return {"x": x - tf.reduce_mean(x)}, y

    def scaled(inputs, y):
        return inputs["x"] * 2.0, y

    def pipeline(source, size, **options):
        data = source.map(centred, num_parallel_calls=2).prefetch(3).map(scaled)
        return data.batch(size, **options).prefetch(2)

    def slices(rows, seed):
        return tf.data.Dataset.from_tensor_slices(blobs(rows, seed=seed))

    layers = [keras.layers.Dense(16), keras.layers.BatchNormalization(synchronized=True)]
    model = compiled([*layers, keras.layers.Dense(4)], keras.optimizers.SGD(0.05))
    data = pipeline(slices(203, 0).shuffle(64, seed=3), 51)
    test = pipeline(slices(77, 1), 16)
    weights = {0: 1.0, 1: 2.0, 2: 0.5, 3: 1.5}
    results = fit(model, data, epochs=2, validation_data=test, class_weight=weights)
    # Goes on in the order of the shuffle.
    again = fit(model, data.repeat(), epochs=2, steps_per_epoch=3)
    unknown = slices(90, 2).filter(lambda x, y: y > 0)
    drops = pipeline(unknown, 15, drop_remainder=True)
    results |= {f"{key}/again": value for key, value in again.items()}
    results |= {f"{key}/unknown": value for key, value in fit(model, drops).items()}
    results["evaluate"] = np.asarray(model.evaluate(pipeline(unknown, 13), verbose=0))
    results["predict"] = model.predict(test, verbose=0)
    return model, results


class Pair(typing.NamedTuple):
    x: typing.Any
    y: typing.Any


@case
def dataset_of_named_tuples_repeated():
    data = tf.data.Dataset.from_tensor_slices(Pair(*blobs())).batch(50, drop_remainder=True)
    plain = tf.data.Dataset.from_tensor_slices(blobs(77, seed=1)).batch(50)
    return trained(mlp(), data.repeat(), epochs=2, steps_per_epoch=3, validation_data=plain)


class Batches(keras.utils.PyDataset):
    def __init__(self, rows=203, batch_size=50, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = blobs(rows)
        self.size = batch_size

    def __len__(self):
        return -(-len(self.x) // self.size)

    def __getitem__(self, index):
        part = slice(index * self.size, (index + 1) * self.size)
        return self.x[part], self.y[part]


@case
def py_dataset():
    data, validation = Batches(workers=2), Batches(rows=77)
    return trained(mlp(), data, epochs=2, shuffle=False, validation_data=validation)


@case
def grain_dataset():
    import grain  # It takes a second, which cases of other kinds need not wait for.

    rows = list(zip(*blobs(203), strict=True))
    data = grain.MapDataset.source(rows).shuffle(seed=3).batch(50)
    validation = data.to_iter_dataset()
    return trained(mlp(), data, epochs=2, validation_data=validation)


@case
def generator():
    def batches():
        data = Batches()
        for _ in range(2):
            for i in range(len(data)):
                yield data[i]

    return trained(mlp(), batches(), epochs=2, steps_per_epoch=5)


@case
def global_clipnorm():
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.1)
    return trained(mlp(optimizer), *blobs(), **numpy_defaults())


@case
def adamw_with_schedule_and_average():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.8)
    optimizer = keras.optimizers.AdamW(
        schedule,
        weight_decay=0.01,
        clipvalue=0.01,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=4,
    )
    return trained(mlp(optimizer), *blobs(), **numpy_defaults())


@case
def gradient_accumulation_in_loop():
    optimizer = keras.optimizers.Adam(0.02, gradient_accumulation_steps=2, clipnorm=0.1)
    return trained(mlp(optimizer, steps_per_execution=3), *blobs(), **numpy_defaults())


class Contrastive(keras.Model):
    """Has no `call`, nothing that is built, and a second optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.layers.Dense(6, "tanh"), keras.layers.Dense(4)])
        self.head = keras.layers.Dense(2)
        self.of_head = keras.optimizers.SGD(0.2, momentum=0.5)

    def views(self, data):
        x = data[0]
        return [self.head(self.encoder(part)) for part in (x[:, :6], x[:, 6:])]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            a, b = self.views(data)
            loss = self.compute_loss(y=tf.tanh(a), y_pred=b)
        first, last = self.encoder.trainable_variables, self.head.trainable_variables
        of_first, of_last = tape.gradient(loss, [first, last])
        self.optimizer.apply(of_first, first)
        self.of_head.apply(of_last, last)
        return self.compute_metrics(data[0], a, b)

    def test_step(self, data):
        a, b = self.views(data)
        self.compute_loss(y=a, y_pred=b)
        return self.compute_metrics(data[0], a, b)


@case
def step_of_its_own_without_call():
    model = Contrastive()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    return trained(model, *blobs(), **numpy_defaults(validation_split=0.3))


class OfRows(keras.Model):
    """Takes dense, ragged or sparse rows, and predicts tensors of all kinds."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        if isinstance(x, tf.RaggedTensor):
            return self.dense(tf.reduce_sum(x, 1)[:, None])
        return self.dense(tf.ensure_shape(tf.sparse.to_dense(x), [None, 3]))

    def predict_step(self, data):
        y = self(data[0] if isinstance(data, tuple) else data)
        ragged = tf.RaggedTensor.from_tensor(y, lengths=tf.cast(y[:, 0] > 0, tf.int32) + 1)
        text = tf.strings.as_string(tf.cast(y > 0, tf.int32)) + "\0\u00e9"
        return {"y": y, "ragged": ragged, "text": text, "sparse": tf.sparse.from_dense(y)}


@case
def on_batch_and_predict_of_ragged_and_sparse_rows():
    ragged = tf.ragged.constant([[1.0, 2.0], [3.0], [], [4.0, 5.0, -6.0], [-7.0]])
    sparse = tf.sparse.from_dense(tf.constant([[1.0, 0, 2], [0, 0, 0], [3, 4, 0], [0, -5, 0]]))
    results = {}
    for kind, x in {"ragged": ragged, "sparse": sparse}.items():
        keras.utils.set_random_seed(1)
        model = OfRows()
        model.compile(keras.optimizers.SGD(0.01), "mse")
        y = np.arange(2.0 * x.shape[0]).reshape(-1, 2)
        for method in (model.train_on_batch, model.test_on_batch):
            results[f"{kind}/{method.__name__}"] = np.asarray(method(x, y))
        data = tf.data.Dataset.from_tensor_slices(x).batch(3)
        for how, found in {
            "on_batch": model.predict_on_batch(x),
            "predict": model.predict(data, verbose=0),
        }.items():
            ragged = found["ragged"]
            dense = tf.sparse.to_dense(found["sparse"])
            results |= {
                f"{kind}/{how}/y": np.asarray(found["y"]),
                f"{kind}/{how}/ragged": ragged.flat_values.numpy(),
                f"{kind}/{how}/lengths": ragged.row_lengths().numpy(),
                f"{kind}/{how}/text": np.char.str_len(np.asarray(found["text"]).astype("S")),
                f"{kind}/{how}/first": np.asarray(found["text"]).astype("S1").astype("int64"),
                f"{kind}/{how}/sparse": dense.numpy(),
            }
    return model, results


class RaggedSums(keras.layers.Layer):
    """Sums of rows of any length, in two features."""

    def call(self, x):
        sums = tf.reduce_sum(x, 1)[:, None]
        return tf.concat([sums, sums**2], 1)

    def compute_output_shape(self, shape):
        return shape[0], 2


@case
def fit_of_ragged_and_sparse_rows():
    """Through layers of a functional model, and in a model of its own."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 6, 41)
    ragged = tf.RaggedTensor.from_row_lengths(rng.normal(size=sum(lengths)), lengths)
    ragged = tf.cast(ragged, tf.float32)
    dense = rng.normal(size=(41, 3)) * (rng.uniform(size=(41, 3)) < 0.5)
    sparse = tf.sparse.from_dense(dense.astype("float32"))
    y, results = rng.normal(size=(41, 2)), {}
    is_plain = not hasattr(tf.distribute.get_strategy(), "engine")
    for kind, x in {"ragged": ragged, "sparse": sparse}.items():
        keras.utils.set_random_seed(1)
        if kind == "ragged":
            inputs = keras.Input((None,), ragged=True)
            hidden = RaggedSums()(inputs)
        else:
            inputs = hidden = keras.Input((3,), sparse=True)
        functional = keras.Model(inputs, keras.layers.Dense(2)(hidden))
        own = OfRows()
        if is_plain:
            # Keras's own build calls it with dense tensors.
            own(x)
        for name, model in {"functional": functional, "own": own}.items():
            # It squares what it gets of a row of a kernel: of sparse inputs, one sum of all.
            model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
            data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
            found = fit(model, data, epochs=2, validation_data=data.take(2))
            results |= {f"{kind}/{name}/{key}": value for key, value in found.items()}
            weights = enumerate(model.get_weights())
            results |= {f"{kind}/{name}/weights/{i}": weight for i, weight in weights}
    return None, results


@case
def regularisers_and_constraint():
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
def metrics():
    """Of several kinds, and a loss that is a sum."""
    model = compiled(
        [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1, activation="sigmoid")],
        keras.optimizers.SGD(0.002),
        keras.losses.BinaryCrossentropy(reduction="sum"),
        [
            "accuracy",
            keras.metrics.AUC(num_thresholds=20),
            keras.metrics.Precision(),
            keras.metrics.F1Score(threshold=0.5),
            "mae",
        ],
    )
    x, y = blobs()
    return trained(model, x, (y > 1).astype("float32")[:, None], **numpy_defaults())


def tokens(rows=83, length=7, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 30, (rows, length)).astype("int32"), rng.integers(0, 3, rows)


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
def mean_with_sample_weight():
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    x, y = blobs()
    weights = np.random.default_rng(5).uniform(0, 2, len(x)).astype("float32")
    return trained(mlp(loss=loss), x, y, **numpy_defaults(sample_weight=weights))


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


class OwnModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="relu")
        self.out = keras.layers.Dense(4)

    def call(self, x):
        return self.out(self.hidden(x))


class OwnStep(OwnModel):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class OwnLoss(OwnModel):
    """As in Keras's guide "Customizing what happens in fit()", with and without a mean."""

    def __init__(self, mean):
        super().__init__()
        self.mean = mean
        self.tracker = keras.metrics.Mean(name="own_loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
            loss = keras.ops.mean(loss) if self.mean else loss
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"own_loss": self.tracker.result(), "last": keras.ops.mean(loss)}


@case
def own_loss_as_vector():
    model = OwnLoss(mean=False)
    model.compile(keras.optimizers.SGD(0.001))
    return trained(model, *blobs(), **numpy_defaults())


@case
def own_loss_with_an_empty_replica():
    model = OwnLoss(mean=True)
    model.compile("sgd")
    return trained(model, *blobs(101), **numpy_defaults())


class GradientPenalty(OwnModel):
    """Takes a gradient by its inputs inside, and logs a variable."""

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                energy = tf.reduce_sum(self(x))
            slopes = inner.gradient(energy, x)
            loss = tf.reduce_mean(tf.square(tf.norm(slopes, axis=1) - 1.0))
        gradients = tape.gradient(loss, self.trainable_variables)
        pairs = [(g, v) for g, v in zip(gradients, self.trainable_variables) if g is not None]
        self.optimizer.apply_gradients(pairs)
        self._loss_tracker.update_state(loss)
        return {"loss": self._loss_tracker.result(), "rate": self.optimizer.learning_rate}


@case
def gradient_penalty():
    model = GradientPenalty()
    model.compile(keras.optimizers.SGD(0.1))
    rates = []
    read = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    model, results = trained(model, *blobs(101), **numpy_defaults(callbacks=[read]))
    return model, results | {"rates": np.asarray(rates)}


@case
def metric_and_loss_functions_of_whole_batches():
    def distance(y, y_pred):
        return tf.reduce_mean(tf.square(y_pred - tf.cast(tf.reshape(y, [-1, 1]), "float32")))

    return trained(mlp(loss=distance, metrics=[distance]), *blobs(101), **numpy_defaults())


class FunctionStep(OwnStep):
    @tf.function
    def train_step(self, data):
        return super().train_step(data)


@case
def train_step_as_function():
    model = FunctionStep()
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    return trained(model, *blobs(), **numpy_defaults())


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


class InBatchNegatives(keras.Model):
    """Pairs, told from those of all other rows of the global batch, as differences.md has it."""

    def __init__(self):
        super().__init__()
        self.left, self.right = keras.layers.Dense(6), keras.layers.Dense(6)

    def call(self, x):
        return self.left(x), self.right(x[:, ::-1])

    def train_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            anchors, positives = self(x, training=True)
            context = tf.distribute.get_replica_context()
            rank, rows = context.replica_id_in_sync_group, tf.shape(anchors)[0]
            candidates = context.all_gather(positives, axis=0)
            owners = context.all_gather(tf.fill([rows], rank), axis=0)
            places = tf.where(owners == rank)[:, 0]
            labels = tf.pad(places, [[0, rows - tf.shape(places)[0]]])
            logits = tf.matmul(anchors, candidates, transpose_b=True)
            loss = self.compute_loss(y=labels, y_pred=logits)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.compute_metrics(x, labels, logits)


@case
def in_batch_negatives():
    """The last batch has one row, so that a worker has none."""
    model = InBatchNegatives()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
    x, _ = blobs(17)
    return trained(model, x, None, **numpy_defaults(batch_size=8))


@case
def evaluate_and_predict():
    model = mlp()
    x, y = blobs()
    model.fit(x, y, **numpy_defaults(verbose=0))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(50)
    return model, {
        "evaluate": np.asarray(model.evaluate(x, y, batch_size=40, verbose=0)),
        "evaluate_dataset": np.asarray(model.evaluate(data, verbose=0)),
        "predict": model.predict(x, batch_size=40, verbose=0),
        "predict_dataset": model.predict(data.map(lambda x, y: x), verbose=0),
        "predict_steps": model.predict(x, batch_size=40, steps=3, verbose=0),
    }


@case
def on_batch():
    model = mlp(optimizer=keras.optimizers.Adam(0.01))
    x, y = blobs(33)
    results = {}
    for step in range(3):
        results[f"train{step}"] = np.asarray(model.train_on_batch(x, y))
    results["weighted"] = np.asarray(
        model.train_on_batch(x, y, class_weight={0: 2.0, 1: 1.0, 2: 1.0, 3: 0.5})
    )
    results["test"] = np.asarray(model.test_on_batch(x, y))
    results["predict"] = model.predict_on_batch(x)
    # Of which some replica has none.
    results["train_on_one"] = np.asarray(model.train_on_batch(x[:1], y[:1]))
    results["test_on_one"] = np.asarray(model.test_on_batch(x[:1], y[:1]))
    results["predict_one"] = model.predict_on_batch(x[:1])
    return model, results


class Recorder(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.logs = []

    def on_train_batch_end(self, batch, logs=None):
        self.logs.append([float(logs["loss"]), float(logs["accuracy"])])


@case
def logs_of_every_batch():
    recorder = Recorder()
    model, results = trained(mlp(), *blobs(), **numpy_defaults(callbacks=[recorder]))
    return model, results | {"logs": np.asarray(recorder.logs)}


@case
def early_stopping_and_plateau():
    callbacks = [
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, min_delta=0.5),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, min_delta=0.5),
    ]
    return trained(
        mlp(),
        *blobs(),
        **numpy_defaults(epochs=12, callbacks=callbacks, validation_data=blobs(60, seed=2)),
    )


def squared(reduction):
    return keras.losses.MeanSquaredError(reduction=reduction)


class SquaredSum(keras.metrics.Metric):
    """A loss inside a metric, as of perplexity: its sum, over the number of rows."""

    def __init__(self, reduction="sum", name="squared_sum"):
        super().__init__(name=name)
        self.loss = squared(reduction)
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")
        self.inner = keras.metrics.Mean(name="inner")
        self.sum = keras.metrics.Sum(name="sum")

    def update_state(self, y_true, y_pred, sample_weight=None):
        labels = tf.one_hot(y_true, 4)
        loss = self.loss(labels, y_pred, sample_weight)
        weights = tf.cast(tf.shape(y_pred)[0], "float32")
        if self.loss.reduction != "sum":
            weights = tf.reduce_sum(tf.cast(sample_weight, "float32"))
            self.total.assign_add(loss * weights)
        else:
            self.total.assign_add(loss)
            self.sum.update_state(loss)
            self.inner.update_state(loss)
        self.count.assign_add(weights)

    def result(self):
        results = {"mean": self.total / self.count, "inner": self.inner.result()}
        results |= {"sum": self.sum.result()}
        return {f"{self.name}/{key}": value for key, value in results.items()}


class SquaredMean(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        loss = squared("sum")(tf.one_hot(y_true, 4), y_pred)
        rows = tf.cast(tf.shape(y_pred)[0], "float32")
        return super().update_state(loss / rows, sample_weight=rows)


class Counting(keras.layers.Layer):
    """Keeps the sum of a loss in a metric of its own, and adds another to the model's."""

    def build(self, shape):
        self.errors = keras.metrics.Sum(name="errors")

    def call(self, inputs):
        loss = squared("sum")(tf.zeros_like(inputs), inputs)
        self.errors.update_state(loss)
        self.add_loss(0.01 * loss)
        return inputs


def twice_the_sum(y_true, y_pred):
    return 2.0 * squared("sum")(tf.one_hot(y_true, 4), y_pred)


def with_losses_in_metrics(**kwargs):
    model = mlp(
        metrics=["accuracy", SquaredSum(), SquaredMean("squared_mean"), twice_the_sum],
        weighted_metrics=[SquaredSum("mean_with_sample_weight", "weighted")],
        **kwargs,
    )
    model.add(Counting())
    weights = np.random.default_rng(5).uniform(0, 2, 203).astype("float32")
    validation = *blobs(77, seed=1), weights[:77]
    options = numpy_defaults(sample_weight=weights, validation_data=validation)
    return trained(model, *blobs(), **options)


@case
def losses_in_metrics():
    return with_losses_in_metrics()


@case
def losses_in_metrics_eagerly():
    return with_losses_in_metrics(run_eagerly=True)


@case
def perplexity_of_keras_hub():
    """Of masked entries, plain and weighted: a loss in a metric that the script has not written."""
    import keras_hub

    def perplexity(name):
        return keras_hub.metrics.Perplexity(from_logits=True, mask_token_id=0, name=name)

    x, y = tokens()
    layers = [keras.layers.Embedding(30, 6), keras.layers.Dense(5)]
    model = compiled(
        layers,
        metrics=[perplexity("plain")],
        weighted_metrics=[perplexity("weighted")],
    )
    weights = np.random.default_rng(5).uniform(0, 2, x.shape).astype("float32")
    options = numpy_defaults(batch_size=20, sample_weight=weights)
    return trained(model, x, x % 5, **options, validation_data=(x[:31], x[:31] % 5))


class Rates(keras.Sequential):
    """Its logs are computed from metrics, some of them with what is no metric's."""

    def __init__(self, layers):
        super().__init__(layers)
        self.other = keras.metrics.Mean(name="other")

    @property
    def metrics(self):
        return [*super().metrics, self.other]

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        before = self.other.result()
        self.other.update_state(tf.reduce_mean(y_pred, -1) + 1.0)
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        logs.pop("other")
        mae, other = logs["mae"], self.other.result()
        logs |= {"twice": 2 * mae, "squared": mae**2, "renamed": other, "mae": mae + 1.0}
        logs |= {"total": self.other.total + 0.0, "ratio": logs["loss"] / (1.0 + mae)}
        logs |= {"change": other - before, "of_x": tf.sqrt(mae) + tf.reduce_mean(x)}
        logs["larger"] = tf.cond(mae > 0.5, lambda: mae, lambda: tf.square(mae))
        return logs


def with_logs_of_metrics(**kwargs):
    model = Rates([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae", "mse"], **kwargs)
    x, y = blobs()
    data = x, y.astype("float32")[:, None]
    validation = data[0][:77], data[1][:77]
    return trained(model, *data, **numpy_defaults(validation_data=validation))


@case
def logs_of_metrics():
    return with_logs_of_metrics()


@case
def logs_of_metrics_eagerly():
    return with_logs_of_metrics(run_eagerly=True)


class ThreeSteps(keras.Sequential):
    """Takes three gradient steps on each batch, in a loop of the graph."""

    def train_step(self, data):
        x, y = data

        def step(i, _):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return i + 1, loss

        before = tf.reduce_sum(self.layers[0].kernel)
        _, loss = tf.while_loop(lambda i, _: i < 3, step, (0, 0.0))
        return {"loss": loss, "change": tf.reduce_sum(self.layers[0].kernel) - before}


@case
def several_steps_in_a_loop():
    hidden = keras.layers.Dense(16, kernel_regularizer="l2")
    model = ThreeSteps([keras.Input((12,)), hidden, keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), loss)
    return trained(model, *blobs(rows=200), **numpy_defaults())


@case
def moving_average_after_skipped_steps():
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3), initial_scale=2.0**8
    )
    layers = [
        keras.layers.Dense(16, activation="relu", kernel_constraint="non_neg"),
        keras.layers.Dense(4),
    ]
    return trained(compiled(layers, optimizer), *blobs(), **numpy_defaults())


class Last(keras.metrics.Metric):
    """The last batch's mean of the labels: replaced, not added to."""

    def __init__(self):
        super().__init__(name="last")
        self.value = self.add_variable((), initializer="zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(tf.reduce_mean(tf.cast(y_true, "float32")))

    def result(self):
        return self.value + 0.0


class Counts(keras.metrics.Metric):
    """A metric with several results, one of them a vector."""

    def __init__(self):
        super().__init__(name="counts")
        self.rows = self.add_variable((), initializer="zeros", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.rows.assign_add(tf.cast(tf.shape(y_true)[0], "float32"))

    def result(self):
        return {"rows": self.rows + 0.0, "parts": self.rows * [0.5, 0.25]}


@asynchronous_case
def metrics_that_replace_or_have_several_results():
    model, sizes = mlp(metrics=["accuracy", Last(), Counts()]), []

    def note(batch, logs):
        sizes.append([np.size(value) for _, value in sorted(logs.items())])

    options = numpy_defaults(validation_data=blobs(77, seed=1))
    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=note)]
    model, results = trained(model, *blobs(), **options, callbacks=callbacks)
    # Those of the first batches may be of no step.
    return model, results | {"sizes": np.asarray(sizes[-1])}


class Meddling(keras.callbacks.Callback):
    """Reads, writes, resets and evaluates while steps may be under way."""

    def __init__(self):
        super().__init__()
        self.evaluated = []

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate.assign(0.1 / (1 + batch))

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.set_weights([0.9 * w for w in self.model.get_weights()])
        if batch == 2:
            self.model.reset_metrics()
        if batch == 3:
            self.evaluated.append(self.model.evaluate(*blobs(77, seed=1), verbose=0))


@asynchronous_case
def callbacks_between_the_steps():
    callback = Meddling()
    model, results = trained(mlp(), *blobs(), **numpy_defaults(callbacks=[callback]))
    return model, results | {"evaluated": np.asarray(callback.evaluated)}


class AlwaysDropout(keras.layers.Dropout):
    def call(self, inputs, training=None):
        return super().call(inputs, training=True)


@asynchronous_case
def random_predictions():
    model = compiled([keras.layers.Dense(16), AlwaysDropout(0.5), keras.layers.Dense(4)])
    x, y = blobs()
    results = fit(model, x, y, **numpy_defaults(epochs=1))
    for i in range(2):
        results[f"predicted/{i}"] = model.predict(x, batch_size=50, verbose=0)
    results["evaluated"] = np.asarray(model.evaluate(x, y, batch_size=50, verbose=0))
    return model, results


class NeedsTheBatchSize(keras.Sequential):
    def train_step(self, data):
        x, _ = data
        assert x.shape[0] == 50
        with tf.GradientTape() as tape:
            similarity = tf.matmul(*[self(x, training=True)] * 2, transpose_b=True)
            loss = tf.reduce_mean((similarity - tf.eye(x.shape[0])) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@asynchronous_case
def batches_of_known_size():
    model = NeedsTheBatchSize([keras.Input((12,)), keras.layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.01), steps_per_execution=2)
    data = tf.data.Dataset.from_tensor_slices(blobs(200)).batch(50, drop_remainder=True)
    return trained(model, data, epochs=2)


class Outputs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_predict_batch_end(self, batch, logs=None):
        self.seen.append(np.asarray(logs["outputs"])[:5])


class FirstTwo(keras.layers.Layer):
    def call(self, inputs):
        return tf.RaggedTensor.from_tensor(
            inputs, lengths=tf.zeros([tf.shape(inputs)[0]], "int32") + 2
        )


@asynchronous_case
def outputs_of_predict():
    x, _ = blobs(53)
    callback = Outputs()
    mlp().predict(x, batch_size=20, verbose=0, callbacks=[callback])
    inputs = keras.Input((12,))
    ragged = keras.Model(inputs, keras.layers.Dense(4)(inputs))
    first_two = FirstTwo()
    ragged.predict_step = lambda data: first_two(
        ragged(data[0] if isinstance(data, tuple) else data)
    )
    ragged.compile()
    predicted = ragged.predict(x, batch_size=20, verbose=0)
    return None, {"seen": np.stack(callback.seen), "ragged": np.asarray(predicted.to_tensor())}


@asynchronous_case
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


def strategies(kinds):
    """Yields a strategy, or none for plain Keras, for each kind of a process."""
    import keras_psplus
    from keras_psplus.all_reduce.collectives import gradients
    from keras_psplus.cluster.in_process import InProcessCluster, logical_devices
    from tests.all_reduce.job_parts import compress

    cluster = all_reduce = None
    if {"devices", "pipeline"} & set(kinds):
        logical_devices(2)
    if "pipelines" in kinds:
        logical_devices(4)
    for kind in kinds:
        if kind == "reference":
            references.build_first()
            yield None
        elif kind == "pipeline":
            yield keras_psplus.PipelineStrategy(microbatches=3)
        elif kind == "pipelines":
            yield keras_psplus.PipelineStrategy(microbatches=2, pipelines=2)
        elif kind in ("workers", "devices", "lossless"):
            if all_reduce is None:
                all_reduce = keras_psplus.MultiWorkerMirroredStrategy(startup_timeout=60)
            if kind == "lossless":
                compress(all_reduce, lossless(), gradients.DEFAULT_BUCKET_BYTES)
            yield all_reduce
        else:
            mode, _, sharded = kind.partition("_")
            if cluster is None:
                # Whose threads are in this process. One worker does not change what it reads.
                cluster = InProcessCluster(workers=2 if mode == "sync" else 1, ps=2)
                cluster.start()
            two = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
            yield keras_psplus.ParameterServerStrategy(
                cluster.cluster_resolver, two if sharded else None, mode=mode
            )


def lossless():
    """Every route that a compressed gradient can take, and nothing lost on it."""
    from keras_psplus import compression

    class Same(compression.RowCompressor):
        def __init__(self, reducible=False, splits=False, error_feedback=False):
            self.reducible, self.supports_reduce_scatter = reducible, splits
            self.error_feedback = error_feedback

        def encode_rows(self, values, step):
            return (values,)

        def decode_rows(self, payload, row_shape, dtype, step):
            return tf.cast(tf.reshape(payload[0], [-1, *row_shape]), dtype)

        def row_bytes(self, row_shape, dtype, step=None):
            return tf.TensorShape(row_shape).num_elements() * tf.as_dtype(dtype).size

    return compression.ByVariable(
        {
            "*bias": compression.TopK(1.0),
            "*dense_1/kernel": Same(reducible=True, error_feedback=True),
            "*kernel": Same(splits=True, error_feedback=True),
            "*gamma": None,
        },
        default=Same(),
        min_size=0,
        min_rank=0,
    )


def run(names, strategy, task, out):
    strategy = strategy or tf.distribute.get_strategy()
    for name in names:
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        print(f"begin {name}", flush=True)
        with strategy.scope():
            model, results = CASES[name]()
        weights = model.get_weights() if model is not None else []
        results = results | {f"weights/{i}": w for i, w in enumerate(weights)}
        path = os.path.join(out, f"{name}.{task}.npz")
        np.savez(path + ".tmp.npz", **results)
        os.replace(path + ".tmp.npz", path)
        print(f"done {name}", flush=True)


def main():
    asked = dict(argument.split("=") for argument in sys.argv[2:])
    for (kind, names), strategy in zip(asked.items(), strategies(list(asked))):
        folder = pathlib.Path(sys.argv[1], kind)
        folder.mkdir(exist_ok=True)
        task = getattr(strategy, "task", None)
        name = "worker-0" if strategy else "reference"
        if task and task.task_type == "worker":
            name = task.name
        run(names.split(",") if names else CASES, strategy, name, folder)


if __name__ == "__main__":
    main()
