"""Data, layers and losses of models with tables, for a cluster and for one process."""

import keras
import numpy as np
import tensorflow as tf

ROWS, DIM, BATCH = 24, 8, 16


def data():
    """Ids and labels. Each batch has all rows, and one of them more than once.

    Tables' optimizers are lazy: those with momenta differ from others by design otherwise.
    """
    random = np.random.default_rng(0)
    x, y = random.integers(0, ROWS, (96, 5)), random.integers(0, 3, (96,))
    for i in range(5):
        x[i::BATCH] = np.arange(5 * i, 5 * i + 5) % ROWS
    return x.astype("int32"), y


@keras.saving.register_keras_serializable("tests")
class OwnAdam(keras.optimizers.Adam):
    """An optimizer that the library does not know, and servers, which have imported this, do."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient + 0.01 * variable, variable, learning_rate)


class OneHot(keras.layers.Layer):
    """An embedding whose gradient is dense, so that it is what any optimizer makes of it."""

    def __init__(self, rows, dim, embeddings_initializer, **kwargs):
        self.options = {
            key: kwargs.pop(f"embeddings_{key}", None) for key in ("regularizer", "constraint")
        }
        super().__init__(**kwargs)
        self.rows, self.dim, self.initializer = rows, dim, embeddings_initializer

    def build(self, shape):
        self.embeddings = self.add_weight(
            shape=(self.rows, self.dim), initializer=self.initializer, name="e", **self.options
        )

    def call(self, ids):
        if isinstance(ids, tf.RaggedTensor):
            return ids.with_flat_values(self.call(ids.flat_values))
        return keras.ops.one_hot(ids, self.rows, dtype="float32") @ self.embeddings


def is_alone():
    """Whether this is the one process that clusters are held against."""
    return getattr(tf.distribute.get_strategy(), "task", None) is None


def embedding(rows=ROWS, dim=DIM, seed=7, one_process=OneHot, **options):
    """A layer with a table, or what stands for it in one process."""
    options.setdefault("embeddings_initializer", initializer(seed))
    return (one_process if is_alone() else keras.layers.Embedding)(rows, dim, **options)


def initializer(seed):
    return keras.initializers.RandomUniform(-0.05, 0.05, seed=seed)


class Twice(keras.Model):
    """A `train_step` of one's own: other data than it is given, two updates, lookups between."""

    def train_step(self, data):
        x, y = data
        x = ROWS - 1 - x
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            for layer in self.layers:
                # Of what stands for rows that are read ahead.
                getattr(layer, "show", lambda: None)()
        return self.compute_metrics(x, y, self(x), None)


def inputs(**options):
    """Five ids an example."""
    return keras.Input((5,), dtype="int32", **options)


def flat(*features):
    """Features of an example side by side."""
    features = [keras.layers.Flatten()(part) for part in features]
    return features[0] if len(features) == 1 else keras.layers.Concatenate()(features)


def head(features):
    features = keras.layers.Dense(
        10, activation="relu", kernel_initializer=keras.initializers.GlorotUniform(3)
    )(features)
    return classifier(features)


def classifier(features):
    """A head without a threshold, at which almost the same rows come to something else."""
    return keras.layers.Dense(
        3, dtype="float32", kernel_initializer=keras.initializers.GlorotUniform(4)
    )(features)


def of_classes():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def one_table(**options):
    """A classifier with one table."""
    ids = inputs()
    return keras.Model(ids, head(flat(embedding(**options)(ids))))


def compiled(model, optimizer, **options):
    model.compile(optimizer=optimizer, loss=of_classes(), metrics=["accuracy"], **options)
    return model


def slots(model):
    """The optimizer's variables."""
    return {f"slot/{i}": np.asarray(v) for i, v in enumerate(model.optimizer.variables)}
