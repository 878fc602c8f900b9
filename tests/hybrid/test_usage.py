"""Ids of any number, files, compressed rows and what is counted of them."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.hybrid.models import (
    BATCH,
    DIM,
    ROWS,
    classifier,
    data,
    embedding,
    flat,
    head,
    inputs,
    is_alone,
    of_classes,
    one_table,
)
from tests.hybrid.traffic import Traffic, rows_of
from tests.support.cluster import equals_one_process, reference, run
from tests.support.results import assert_close
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

EPOCHS = 2
FACTORS = np.linspace(-1, 1, 5 * DIM, dtype="float32")
# Words of float32 for a row of eight numbers; that of int8 has its scale with it.
WORDS = {"bf16": 4, "int8": 3}


def linear(y, rows):
    """A loss whose gradient does not depend on what is read."""
    return tf.reduce_mean(rows * FACTORS * (1 + tf.cast(tf.reshape(y, [-1, 1]), tf.float32)))


def plain():
    """Training, what `communication` and its monitor say of it, and rows as they are read."""
    x, y = data()
    ids, other = inputs(), embedding(seed=8, name="other")
    model = keras.Model(ids, [classifier(flat(embedding(name="table")(ids))), flat(other(ids))])
    model.compile(optimizer=keras.optimizers.SGD(0.5), loss=[of_classes(), linear])
    results = {f"initial/{i}": w for i, w in enumerate(model.get_weights())}
    monitor, traffic = [], None
    if not is_alone():
        from keras_psplus.callbacks import CommunicationMonitor

        monitor, traffic = [CommunicationMonitor()], Traffic()
    options = {"epochs": EPOCHS, "shuffle": False, "verbose": 0}
    history = model.fit(x, [y, y], BATCH, callbacks=monitor, **options).history
    if traffic:
        results["own monitored"] = history["comm/bytes"]
        results |= traffic.since()
    results["read"] = model.predict(x, verbose=0)[1].reshape(-1, 5, DIM)
    results["other"] = other.get_weights()[0]
    return model, results


def check_counted(found, push, pull):
    """Checks bytes of `plain`, given how rows are compressed."""
    x, _ = data()
    for task, of in found.items():
        rows, sent = EPOCHS * rows_of(task, x, BATCH), 0
        for direction, compression in (("gradient", push), ("pull", pull)):
            words = WORDS[compression]
            # The row's number goes with it.
            expected = [4 * rows * n for n in (DIM, words, words + 1)]
            for table in ("table", "other"):
                assert of[f"own {direction} of {table}/embeddings"].tolist() == expected
                sent += expected[2]
        # The monitor's bytes of a step, times steps, are all that was sent: what is dense, too.
        assert len(x) // BATCH * sum(of["own monitored"]) == of["own total"] > sent


class Sum(keras.layers.Layer):
    """The sum of an example's rows, however many."""

    def call(self, rows):
        return tf.reduce_sum(rows, axis=1)

    def compute_output_shape(self, shape):
        return shape[0], shape[-1]


def words(x):
    """From no ids for an example to seven, some of them more than once."""
    random = np.random.default_rng(3)
    rows = [[*row, *row[:2]][: random.integers(0, 8)] for row in x]
    rows[1] = [5] * 7
    return tf.ragged.constant(rows, tf.int32, ragged_rank=1)


def several():
    """One table for ragged ids and for many-hot ones."""
    x, y = data()
    ragged = keras.Input((None,), dtype="int32", ragged=True)
    tags, shared = inputs(), embedding()
    parts = [Sum()(shared(ragged)), Sum()(shared(tags))]
    model = keras.Model([ragged, tags], head(keras.layers.Concatenate()(parts)))
    # Which squares: rows that come more than once have to be summed before.
    model.compile(optimizer=keras.optimizers.Adagrad(0.2), loss=of_classes())
    # Tags are few, and come again and again.
    dataset = tf.data.Dataset.from_tensor_slices(((words(x), x // 5 * 5), y)).batch(BATCH + 3)
    return model, model.fit(dataset, epochs=EPOCHS, verbose=0).history


@pytest.mark.extended
def test_ragged_many_hot_and_repeated_ids_equal_one_process():
    equals_one_process("hybrid22", several, 1e-4)


def unequal_shares(x, y):
    """For each worker data of its own, of four steps and of two; for one process all batches."""
    half = BATCH // 2
    shares = np.split(np.arange(6 * half), [4 * half])
    if is_alone():
        steps = [np.concatenate([s[i : i + half] for s in shares]) for i in range(0, 32, half)]
        parts = [tf.data.Dataset.from_tensors((x[rows], y[rows])) for rows in steps]
        return functools.reduce(lambda whole, part: whole.concatenate(part), parts)
    mine = shares[tf.distribute.get_strategy().task.task_index]
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).batch(BATCH).with_options(options)


def uneven():
    """A worker has no rows: of a batch of one, or as it has run out of data."""
    x, y = data()
    model = one_table(name="few")
    model.compile(optimizer=keras.optimizers.Adagrad(0.1), loss=of_classes())
    shares = unequal_shares(x, y)
    x, y = x[: 2 * BATCH + 1], y[: 2 * BATCH + 1]
    traffic = None if is_alone() else Traffic()
    results = model.fit(x, y, BATCH, shuffle=False, verbose=0).history
    results |= traffic.since() if traffic else {}
    results["of shares"] = model.fit(shares, verbose=0).history["loss"]
    return model, results | {"evaluated": model.evaluate(x, y, BATCH, verbose=0)}


@pytest.mark.extended
def test_a_worker_without_rows_changes_and_counts_nothing():
    found, expected = run("hybrid22", uneven), reference(uneven)
    assert_close({name: found.first[name] for name in expected}, expected, 1e-4)
    for task, of in found.items():
        for direction in ("gradient", "pull"):
            sent = of[f"own {direction} of few/embeddings"][0]
            assert sent == 4 * DIM * rows_of(task, data()[0][: 2 * BATCH + 1], BATCH)


def stored():
    """A model that is stored."""
    model = keras.Model(ids := inputs(), classifier(flat(keras.layers.Embedding(ROWS, DIM)(ids))))
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss=of_classes())
    model.optimizer.build(model.trainable_variables)
    return model


def state_of(model):
    """All that a file has to hold."""
    return {
        **{f"weight {i}": w for i, w in enumerate(model.get_weights())},
        **{f"slot {i}": v.numpy() for i, v in enumerate(model.optimizer.variables)},
    }


def train_on(model):
    model.fit(*data(), BATCH, shuffle=False, verbose=0)


def write(folder, model):
    model.save(f"{folder}/all.keras")
    model.save_weights(f"{folder}/all.weights.h5")
    tf.train.Checkpoint(model=model).write(f"{folder}/checkpoint")


def written(folder):
    """Has one process, without a strategy, write a model; then what it is once trained on."""
    model = stored()
    train_on(model)
    write(folder, model)
    before = state_of(model)
    train_on(model)
    return named("before", before) | named("after", state_of(model))


def read(folder):
    """The states of models that were read in all ways, and the last of them."""
    model, states = stored(), {}
    model.load_weights(f"{folder}/all.weights.h5")
    states |= named("weights", state_of(model))
    model = stored()
    tf.train.Checkpoint(model=model).read(f"{folder}/checkpoint").assert_consumed()
    states |= named("checkpoint", state_of(model))
    model = keras.models.load_model(f"{folder}/all.keras")
    return states | named("model", state_of(model)), model


def read_and_written(folder, other):
    """Reads, and trains on; then the chief writes."""
    states, model = read(folder)
    train_on(model)
    if tf.distribute.get_strategy().is_chief:
        write(other, model)
    return states | named("trained", state_of(model))


def read_again(folder):
    return read(folder)[0]


def named(prefix, state):
    return {f"{prefix} {name}": value for name, value in state.items()}


def part(state, prefix):
    """What has a prefix, without it."""
    prefix += " "
    return {k.removeprefix(prefix): state[k] for k in state if k.startswith(prefix)}


@pytest.mark.parametrize("layout", ["hybrid22", *extended("hybrid21_all")])
def test_files_of_one_process_are_read_by_a_job_and_its_own_by_one_process(layout, tmp_path):
    folder, other = tmp_path / "alone", tmp_path / "job"
    folder.mkdir(), other.mkdir()
    alone = run("plain", written, folder=str(folder)).first
    job = run(layout, read_and_written, folder=str(folder), other=str(other)).first
    again = run("plain", read_again, folder=str(other)).first
    for way in ("weights", "checkpoint", "model"):
        assert_close(part(job, way), part(alone, "before"), 2e-5)
        assert_close(part(again, way), part(job, "trained"), 2e-5)
    assert_close(part(job, "trained"), part(alone, "after"), 2e-5)


def test_compressed_rows_train_nearly_alike_and_are_counted_as_what_is_sent():
    # `test_rows.py` has what either makes of rows.
    found, exact = run("hybrid21_compressed", plain), reference(plain)
    check_counted(found, "bf16", "int8")
    first = found.first
    trained = [name for name in exact if name.startswith("weights/")]
    assert len(trained) == 4
    for name in trained:
        learned = np.abs(exact[name] - exact[name.replace("weights", "initial")]).max()
        # Other jobs without compression are nearer than that. The gradients of the table `other`
        # do not depend on rows that are read: it shows what is lost when they are sent.
        assert 1e-5 < np.abs(first[name] - exact[name]).max() < 0.01 * learned, name
    rows = first["other"][data()[0]]
    # The distance between two numbers that can be told apart.
    limit = np.abs(rows).max(axis=-1, keepdims=True) / 127
    lost = np.abs(first["read"] - rows)
    assert lost.max() > 1e-5 and np.all(lost <= limit * 1.001)
