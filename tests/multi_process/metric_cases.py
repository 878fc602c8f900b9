"""Cases of metrics, losses and logs, and of callbacks that look at them."""

import keras
import numpy as np
import tensorflow as tf

from tests.multi_process.case_models import (
    blobs,
    case,
    compiled,
    mlp,
    numpy_defaults,
    tokens,
    trained,
)


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


@case
def mean_with_sample_weight():
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    x, y = blobs()
    weights = np.random.default_rng(5).uniform(0, 2, len(x)).astype("float32")
    return trained(mlp(loss=loss), x, y, **numpy_defaults(sample_weight=weights))


@case
def metric_and_loss_functions_of_whole_batches():
    def distance(y, y_pred):
        return tf.reduce_mean(tf.square(y_pred - tf.cast(tf.reshape(y, [-1, 1]), "float32")))

    return trained(mlp(loss=distance, metrics=[distance]), *blobs(101), **numpy_defaults())


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


@case
def losses_in_metrics(**kwargs):
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
def losses_in_metrics_eagerly():
    return losses_in_metrics(run_eagerly=True)


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


@case
def logs_of_metrics(**kwargs):
    model = Rates([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae", "mse"], **kwargs)
    x, y = blobs()
    data = x, y.astype("float32")[:, None]
    validation = data[0][:77], data[1][:77]
    return trained(model, *data, **numpy_defaults(validation_data=validation))


@case
def logs_of_metrics_eagerly():
    return logs_of_metrics(run_eagerly=True)


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


@case
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


@case
def callbacks_between_the_steps():
    callback = Meddling()
    model, results = trained(mlp(), *blobs(), **numpy_defaults(callbacks=[callback]))
    return model, results | {"evaluated": np.asarray(callback.evaluated)}
