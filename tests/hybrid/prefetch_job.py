"""Ways of training with rows that are read ahead, for a cluster and for one process.

prefetch_job.py FOLDER CASES [--reference]

The one process holds the tables itself, and reads them as they were before the last step's update,
except in the first batch of an epoch whose data begin anew: that is what reading ahead comes to.
"""

import contextlib
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from tests.faults.at_batch import AtBatch
from tests.hybrid.training_job import BATCH, DIM, ROWS, OneHot, head, initializer, run_cases

AutoShardPolicy = tf.data.experimental.AutoShardPolicy


class Late(OneHot):
    """An embedding that shows its rows as they were; gradients go to them as they are."""

    def build(self, shape):
        super().build(shape)
        self.shown = tf.Variable(self.embeddings.value, trainable=False)

    def call(self, ids):
        ids = tf.where(ids < 0, ids + self.rows, ids)
        now = self.embeddings.value
        return tf.one_hot(ids, self.rows) @ (now - tf.stop_gradient(now) + self.shown)

    def show(self, value=None):
        self.shown.assign(self.embeddings.value if value is None else value)


class Follow(keras.callbacks.Callback):
    """Sees to what the one process shows: `begins_anew` says whether an epoch's data do."""

    def __init__(self, begins_anew=True):
        super().__init__()
        self.begins_anew, self.before, self.kept = begins_anew, {}, {}

    def tables(self):
        return [layer for layer in self.model.layers if isinstance(layer, Late)]

    def on_epoch_begin(self, epoch, logs=None):
        if self.begins_anew or epoch == 0:
            self.refresh()

    def refresh(self):
        for table in self.tables():
            table.show()

    def on_train_batch_begin(self, batch, logs=None):
        self.before = {t: t.embeddings.numpy() for t in self.tables()}

    def on_train_batch_end(self, batch, logs=None):
        for table, value in self.before.items():
            table.show(value)

    def on_test_begin(self, logs=None):
        self.kept = {t: t.shown.numpy() for t in self.tables()}
        self.refresh()

    def on_test_end(self, logs=None):
        for table, value in self.kept.items():
            table.show(value)


class Change(keras.callbacks.Callback):
    """Changes weights when an epoch ends: what was read before that is of no use.

    Args:
        follow: `Follow`, or None.
        batch: What to train on when the first one ends, or None.
    """

    def __init__(self, follow, batch):
        super().__init__()
        self.follow, self.batch = follow, batch

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0 and self.batch:
            self.refresh()
            self.model.train_on_batch(*self.batch)
            self.refresh()
        if epoch == 1:
            self.model.set_weights([w / 2 for w in self.model.get_weights()])
            self.refresh()

    def refresh(self):
        if self.follow:
            self.follow.refresh()


def two_tables(embedding):
    """One table that is looked up twice, with ids from the end, and one by hashes of its ids."""
    ids = keras.Input((5,), dtype="int32")
    shared = embedding(ROWS, DIM, embeddings_initializer=initializer(7))
    other = embedding(ROWS, 4, embeddings_initializer=initializer(8))
    hashed = keras.layers.Hashing(ROWS)(ids)
    parts = [shared(ids[:, :2]), shared(ids[:, 3:] - ROWS)]
    parts = [keras.layers.Flatten()(part) for part in parts]
    several = keras.ops.sum(other(hashed), axis=1)
    return keras.Model(ids, head(keras.layers.Concatenate()([*parts, several])))


def one_table(embedding):
    ids = keras.Input((5,), dtype="int32")
    rows = embedding(ROWS, DIM, embeddings_initializer=initializer(7))(ids)
    return keras.Model(ids, head(keras.layers.Flatten()(rows)))


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
                if isinstance(layer, Late):
                    layer.show()
        return self.compute_metrics(x, y, self(x), None)


def dependent(embedding):
    """The second table's ids depend on rows of the first: only these are read ahead."""
    ids = keras.Input((5,), dtype="int32")
    rows = embedding(ROWS, DIM, embeddings_initializer=initializer(7))(ids)
    second = OneHot if embedding is Late else embedding
    largest = keras.ops.argmax(rows, axis=-1)
    more = second(ROWS, DIM, embeddings_initializer=initializer(8), name="second")(largest)
    return Twice(ids, head(keras.layers.Flatten()(keras.layers.Add()([rows, more]))))


def compiled(model, optimizer, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], **options)
    return model


def arrays(embedding, x, y):
    """Uneven batches of arrays, several steps an execution, two tables."""
    model = compiled(
        two_tables(embedding),
        keras.optimizers.Adagrad(0.5),
        steps_per_execution=1 if embedding is Late else 3,
    )
    callbacks = [Follow()] if embedding is Late else []
    return model, model.fit(x, y, 19, 2, 0, callbacks, shuffle=False).history


def stream(embedding, x, y):
    """Data whose end is not known before it comes, and a step of one's own."""

    def batches():
        for i in range(0, len(x), BATCH):
            yield x[i : i + BATCH - i // BATCH], y[i : i + BATCH - i // BATCH]

    spec = tf.TensorSpec([None, 5], tf.int32), tf.TensorSpec([None], tf.int64)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    model = compiled(dependent(embedding), keras.optimizers.SGD(0.3))
    callbacks = [Follow()] if embedding is Late else []
    return model, model.fit(dataset, epochs=2, verbose=0, callbacks=callbacks).history


def own_share(x, y):
    """The rows that this worker has of all batches."""
    half = BATCH // 2
    first = half * tf.distribute.get_strategy().task.task_index
    mine = np.arange(len(x)).reshape(-1, BATCH)[:, first : first + half].flatten()
    return x[mine], y[mine]


def unending(embedding, x, y):
    """Epochs that go on in the data; other training, weights that are set, validation in between.

    Then the model is compiled again; in that `fit`, each worker of the cluster has a share of its
    own.
    """
    model, results = one_table(embedding), {}
    for i, clip in enumerate((None, 0.05)):
        has_share = clip and embedding is not Late
        dataset = tf.data.Dataset.from_tensor_slices(own_share(x, y) if has_share else (x, y))
        dataset = dataset.batch(BATCH, drop_remainder=True).repeat()
        if has_share:
            options = tf.data.Options()
            options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
            dataset = dataset.with_options(options)
        compiled(model, keras.optimizers.SGD(0.5, global_clipnorm=clip))
        follow = Follow(begins_anew=False) if embedding is Late else None
        batch = None if clip else (x[:BATCH], y[:BATCH])
        history = model.fit(
            dataset,
            steps_per_epoch=4,
            epochs=3,
            verbose=0,
            validation_data=None if clip else (x[:30], y[:30]),
            callbacks=[*([follow] if follow else []), Change(follow, batch)],
        )
        results.update({f"{i} {name}": value for name, value in history.history.items()})
    return model, results


class BrokenOff(Exception):
    """What ends a `fit`."""


def break_off():
    raise BrokenOff


def broken_off(embedding, x, y):
    """A `fit` that goes on from its backup, with the rows that were read ahead then."""
    model = compiled(one_table(embedding), keras.optimizers.Adagrad(0.5))
    options = {"batch_size": BATCH, "epochs": 2, "verbose": 0, "shuffle": False}
    if embedding is Late:
        return model, model.fit(x, y, callbacks=[Follow()], **options).history
    backup = keras.callbacks.BackupAndRestore(pathlib.Path(sys.argv[1]) / "backup", save_freq=3)
    with contextlib.suppress(BrokenOff):
        model.fit(x, y, callbacks=[backup, AtBatch(0, 4, break_off)], **options)
    return model, model.fit(x, y, callbacks=[backup], **options).history


CASES = {case.__name__: case for case in (arrays, stream, unending, broken_off)}


def main():
    folder, names = pathlib.Path(sys.argv[1]), sys.argv[2].split(",")
    alone = "--reference" in sys.argv
    strategy = psp.HybridStrategy(placement="parameter_server", prefetch=True)
    cases = {name: CASES[name] for name in names}
    run_cases(cases, strategy, Late if alone else keras.layers.Embedding, folder, alone)


if __name__ == "__main__":
    main()
