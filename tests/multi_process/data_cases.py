"""Cases of data: arrays, datasets and generators, in `fit`, `evaluate` and `predict`."""

import random
import typing

import keras
import numpy as np
import tensorflow as tf

from tests.multi_process.case_models import blobs, case, compiled, fit, mlp, numpy_defaults, trained


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


def of_rows(kind):
    """41 ragged or sparse rows."""
    rng = np.random.default_rng(0)
    if kind == "ragged":
        lengths = rng.integers(0, 6, 41)
        return tf.cast(
            tf.RaggedTensor.from_row_lengths(rng.normal(size=sum(lengths)), lengths), tf.float32
        )
    dense = rng.normal(size=(41, 3)) * (rng.uniform(size=(41, 3)) < 0.5)
    return tf.sparse.from_dense(dense.astype("float32"))


def functional_of_rows(kind, x):
    if kind == "ragged":
        inputs = keras.Input((None,), ragged=True)
        hidden = RaggedSums()(inputs)
    else:
        inputs = hidden = keras.Input((3,), sparse=True)
    return keras.Model(inputs, keras.layers.Dense(2)(hidden))


def own_of_rows(kind, x):
    model = OfRows()
    if not hasattr(tf.distribute.get_strategy(), "engine"):
        # Keras's own build calls it with dense tensors.
        model(x)
    return model


def fitted_to_rows(makers):
    results, y = {}, np.random.default_rng(1).normal(size=(41, 2))
    for kind, make in makers.items():
        x = of_rows(kind)
        keras.utils.set_random_seed(1)
        model = make(kind, x)
        # It squares what it gets of a row of a kernel: of sparse inputs, one sum of all.
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        found = fit(model, data, validation_data=data.take(2))
        results |= {f"{kind}/{key}": value for key, value in found.items()}
        results |= {f"{kind}/weights/{i}": w for i, w in enumerate(model.get_weights())}
    return None, results


@case
def ragged_and_sparse_rows():
    return fitted_to_rows({"ragged": functional_of_rows, "sparse": own_of_rows})


@case
def ragged_and_sparse_rows_by_other_models():
    return fitted_to_rows({"ragged": own_of_rows, "sparse": functional_of_rows})


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


class AlwaysDropout(keras.layers.Dropout):
    def call(self, inputs, training=None):
        return super().call(inputs, training=True)


@case
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


@case
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


@case
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
