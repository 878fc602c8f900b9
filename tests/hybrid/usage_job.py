"""What people do with a model whose tables lie on servers, for a cluster and for one process.

usage_job.py FOLDER CASES [--reference] [push=COMPRESSION] [pull=COMPRESSION]

`plain` trains, and counts what it sends; `several` has a varying number of ids for each example;
`uneven` leaves workers without rows; `files` needs those that `write_files` has left in the folder,
and leaves some itself.
"""

import functools
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import keras_psplus as psp
from tests.hybrid.training_job import BATCH, DIM, ROWS, OneHot, data, head, initializer, run_cases

EPOCHS = 2
FACTORS = np.linspace(-1, 1, 5 * DIM, dtype="float32")


def classifier(table, ids):
    """Of five ids, without a threshold at which almost the same rows come to something else."""
    last = keras.layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(4))
    return last(keras.layers.Flatten()(table(ids)))


def of_classes():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def linear(y, rows):
    """A loss whose gradient does not depend on what is read."""
    return tf.reduce_mean(rows * FACTORS * (1 + tf.cast(tf.reshape(y, [-1, 1]), tf.float32)))


def plain(embedding, x, y):
    """Training alone, what `communication` and its monitor say of it, and rows as they are read."""
    ids = keras.Input((5,), dtype="int32")
    table = embedding(ROWS, DIM, embeddings_initializer=initializer(7), name="table")
    other = embedding(ROWS, DIM, embeddings_initializer=initializer(8), name="other")
    shown = keras.layers.Flatten()(other(ids))
    model = keras.Model(ids, [classifier(table, ids), shown])
    model.compile(optimizer=keras.optimizers.SGD(0.5), loss=[of_classes(), linear])
    results = {f"initial_{i}": w for i, w in enumerate(model.get_weights())}
    monitor = [] if embedding is OneHot else [psp.callbacks.CommunicationMonitor()]
    history = model.fit(
        x, [y, y], BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=monitor
    ).history
    if monitor:
        communication = tf.distribute.get_strategy().communication
        results["total"] = communication.wire_bytes
        results["monitored"] = history["comm/bytes"]
        for entry in communication.traffic():
            counted = entry.logical_bytes, entry.compressed_bytes, entry.wire_bytes
            results[f"{entry.direction} of {entry.path}"] = counted
    results["read"] = model.predict(x, verbose=0)[1].reshape(-1, 5, DIM)
    results["other"] = other.get_weights()[0]
    return model, results


class Sum(keras.layers.Layer):
    """The sum of an example's rows, however many."""

    def call(self, rows):
        return tf.reduce_sum(rows, axis=1)

    def compute_output_shape(self, shape):
        return shape[0], shape[-1]


class OneHotOfRagged(OneHot):
    """The same of ids that are ragged or not."""

    def call(self, ids):
        if isinstance(ids, tf.RaggedTensor):
            return ids.with_flat_values(super().call(ids.flat_values))
        return super().call(ids)


def words(x):
    """From no ids for an example to seven, some of them more than once."""
    random = np.random.default_rng(3)
    rows = [[*row, *row[:2]][: random.integers(0, 8)] for row in x]
    rows[1] = [5] * 7
    return tf.ragged.constant(rows, tf.int32, ragged_rank=1)


def several(embedding, x, y):
    """One table for ragged ids and for many-hot ones, and one for the latter alone."""
    embedding = OneHotOfRagged if embedding is OneHot else embedding
    ragged = keras.Input((None,), dtype="int32", ragged=True)
    tags = keras.Input((5,), dtype="int32")
    shared = embedding(ROWS, DIM, embeddings_initializer=initializer(7))
    other = embedding(ROWS, 4, embeddings_initializer=initializer(8))
    parts = [Sum()(shared(ragged)), Sum()(shared(tags)), Sum()(other(tags))]
    model = keras.Model([ragged, tags], head(keras.layers.Concatenate()(parts)))
    # Which squares: rows that come more than once have to be summed before.
    model.compile(optimizer=keras.optimizers.Adagrad(0.2), loss=of_classes())
    # Tags are few, and come again and again.
    dataset = tf.data.Dataset.from_tensor_slices(((words(x), x // 5 * 5), y)).batch(BATCH + 3)
    history = model.fit(dataset, epochs=EPOCHS, verbose=0).history
    return model, {**history, "predicted": model.predict(dataset, verbose=0)}


def unequal_shares(embedding, x, y):
    """For each worker data of its own, of four steps and of two; for one process all batches."""
    half = BATCH // 2
    shares = np.split(np.arange(6 * half), [4 * half])
    if embedding is OneHot:
        steps = [np.concatenate([s[i : i + half] for s in shares]) for i in range(0, 32, half)]
        parts = [tf.data.Dataset.from_tensors((x[rows], y[rows])) for rows in steps]
        return functools.reduce(lambda whole, part: whole.concatenate(part), parts)
    mine = shares[tf.distribute.get_strategy().task.task_index]
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).batch(BATCH).with_options(options)


def uneven(embedding, x, y):
    """Convolutions where a worker has no rows: of a batch of one, or as it has run out of data."""
    ids = keras.Input((5,), dtype="int32")
    rows = embedding(ROWS, DIM, embeddings_initializer=initializer(7), name="images")(ids)
    images = keras.layers.Reshape((5, DIM, 1))(rows)
    maps = keras.layers.Conv2D(
        2, 2, activation="relu", kernel_initializer=keras.initializers.GlorotUniform(5)
    )(images)
    maps = keras.layers.BatchNormalization(synchronized=True)(maps)
    model = keras.Model(ids, head(keras.layers.Flatten()(maps)))
    model.compile(optimizer=keras.optimizers.Adagrad(0.1), loss=of_classes())
    shares = unequal_shares(embedding, x, y)
    x, y = x[: 2 * BATCH + 1], y[: 2 * BATCH + 1]
    results = model.fit(x, y, BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history
    if embedding is not OneHot:
        for entry in tf.distribute.get_strategy().communication.traffic():
            results[f"{entry.direction} of {entry.path}"] = entry.logical_bytes
    results["of shares"] = model.fit(shares, verbose=0).history["loss"]
    results["evaluated"] = model.evaluate(x, y, BATCH, verbose=0)
    return model, {**results, "predicted": model.predict(x, BATCH, verbose=0)}


def from_files(embedding):
    """A model that is stored; each batch of `data` touches all of its rows."""
    ids = keras.Input((5,), dtype="int32")
    table = embedding(ROWS, DIM, embeddings_initializer=initializer(7))
    model = keras.Model(ids, classifier(table, ids))
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss=of_classes())
    model.optimizer.build(model.trainable_variables)
    return model


def state_of(model, x):
    """All that a file has to hold, and what the model makes of it."""
    return {
        "predicted": model.predict(x, verbose=0),
        **{f"weight {i}": w for i, w in enumerate(model.get_weights())},
        **{f"slot {i}": v.numpy() for i, v in enumerate(model.optimizer.variables)},
    }


def named(prefix, state):
    return {f"{prefix} {name}": value for name, value in state.items()}


def train_on(model, x, y):
    model.fit(x, y, BATCH, shuffle=False, verbose=0)


def files(folder, embedding, x, y):
    """Loads what one process has written, in all ways; then the chief writes."""
    model = from_files(embedding)
    model.load_weights(folder / "alone.weights.h5")
    results = named("weights", state_of(model, x))
    model = from_files(embedding)
    tf.train.Checkpoint(model=model).read(f"{folder}/alone").assert_consumed()
    results.update(named("checkpoint", state_of(model, x)))
    model = keras.models.load_model(folder / "alone.keras")
    results.update(named("model", state_of(model, x)))
    train_on(model, x, y)
    results.update(named("trained", state_of(model, x)))
    if tf.distribute.get_strategy().is_chief:
        write(model, folder, "job")
    return model, results


def write(model, folder, name):
    model.save(folder / f"{name}.keras")
    model.save_weights(folder / f"{name}.weights.h5")
    tf.train.Checkpoint(model=model).write(f"{folder}/{name}")


def write_files(folder):
    """Has this process, without a strategy, write what `files` loads; returns what is in it.

    And what the model is once it has been trained on.
    """
    keras.utils.set_random_seed(2)
    x, y = data()
    model = from_files(keras.layers.Embedding)
    train_on(model, x, y)
    write(model, folder, "alone")
    before = state_of(model, x)
    train_on(model, x, y)
    return before, state_of(model, x)


def main():
    folder, names, alone = pathlib.Path(sys.argv[1]), sys.argv[2], "--reference" in sys.argv
    options = dict(word.split("=") for word in sys.argv[3:] if "=" in word)
    strategy = psp.HybridStrategy(
        placement="parameter_server",
        row_compression=options.get("push"),
        pull_compression=options.get("pull"),
        job_token="of all tasks of this test",
    )
    cases = {"plain": plain, "several": several, "uneven": uneven}
    cases |= {"files": functools.partial(files, folder)}
    cases = {name: cases[name] for name in names.split(",")}
    run_cases(cases, strategy, OneHot if alone else keras.layers.Embedding, folder, alone)


if __name__ == "__main__":
    main()
