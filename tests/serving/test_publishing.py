"""Tables and models that a job publishes while it trains, and what others read of them."""

import contextlib
import itertools
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from tests.parameter_server.options import options
from tests.serving import publishing_job
from tests.support.cluster import run
from tests.support.jobs import environment, wait_for
from tests.support.tiers import extended

JOB = pathlib.Path(__file__).with_name("publishing_job.py")


@pytest.mark.processes
def test_another_process_has_one_version_in_each_answer(tmp_path):
    """A reader that looks all the time, until the publisher is killed within the next version."""
    published, ids = tmp_path / "published", publishing_job.IDS.reshape(20, 3)
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, JOB, tmp_path], env=environment(), stdout=log, stderr=log
        )
    try:
        wait_for((published / "manifest.json").exists, 120, shown=(tmp_path / "log").read_text)
        reader = psp.serving.TableReader(published, poll=0.01)
        served, answers = reader.model(), []
        while served.step < publishing_job.STEPS and process.poll() is None:
            pinned = served.pinned()
            answers += [(None, served(ids).numpy()), (pinned.version, pinned(ids).numpy())]
            # For the processor's sake: the trainer's next version takes longer.
            time.sleep(0.03)
        (tmp_path / "seen").touch()
        assert process.wait(60) == -signal.SIGKILL, (tmp_path / "log").read_text()
    finally:
        process.kill()
    left = os.listdir(published)
    assert "00000011-1-rows.npy" in left and "00000011-0-gone.npy" in left
    answers.append((publishing_job.STEPS, served(ids).numpy()))
    weights = [dict(np.load(tmp_path / f"{i + 1}.npz")) for i in range(publishing_job.STEPS)]
    expected = np.stack([publishing_job.outputs(one, ids) for one in weights])
    # A mixture would be seen.
    tables = [name for name in weights[0] if name[-2:] in ("_a", "_b")]
    for before, after in itertools.pairwise(weights):
        for names in (["kernel", "bias"], ["fixed"], tables, tables[:2], tables[2:]):
            mixed = publishing_job.outputs({**before, **{n: after[n] for n in names}}, ids)
            assert np.abs(mixed - expected).max((1, 2)).min() > 1e-3
    seen = []
    for version, answer in answers:
        fits = np.flatnonzero(np.abs(answer - expected).max((1, 2)) < 1e-5) + 1
        assert len(fits) == 1 and version in (None, *fits)
        seen += fits.tolist()
    assert seen == sorted(seen) and len(set(seen)) >= 4 and seen[-1] == publishing_job.STEPS

    # The killed version is nobody's, and the next publisher clears it away.
    assert not reader.refresh()
    again = psp.serving.TableReader(published, poll=None)
    np.testing.assert_array_equal(again.model()(ids), answers[-1][1])
    gone = set(weights[0]["keys_a"].tolist()) - set(weights[-1]["keys_a"].tolist())
    assert gone and not again.lookup(sorted(gone), "published_a/table").any()
    model = publishing_job.build()
    publish = psp.serving.PublishTables(published, model=True)
    model.fit(*publishing_job.batches(1), verbose=0, callbacks=[publish])
    wait_for(lambda: served.version == 11)
    np.testing.assert_allclose(served(ids), model.predict(ids, verbose=0), atol=1e-6)
    assert not {"00000011-1-gone.npy", "00000011-0-gone.npy"} & set(os.listdir(published))
    reader.close()


def served_while_trained(strategy, folder, mode=None):
    """Compares what a reader has after each step with what the model has."""
    published, ids = pathlib.Path(folder) / "published", publishing_job.IDS.reshape(20, 3)
    with options(strategy, mode=mode), strategy.scope():
        model, readers, steps = publishing_job.build(), [], []
        has_one_step = getattr(strategy, "sync", True)

        def look(batch, logs):
            if not strategy.is_chief:
                return
            if not readers:
                reader = psp.serving.TableReader(published, poll=None)
                readers[:] = [reader, reader.model()]
            readers[0].refresh()
            answer = readers[1](ids).numpy()
            if has_one_step:
                expected = publishing_job.outputs(publishing_job.weights_of(model), ids)
                np.testing.assert_allclose(answer, expected, atol=1e-5)
            steps.append(readers[1].step)

        publish = psp.serving.PublishTables(published, every=1, model=True)
        callbacks = [publish, keras.callbacks.LambdaCallback(on_train_batch_end=look)]
        x, y = publishing_job.batches(4)
        data = tf.data.Dataset.from_tensor_slices((x, y[:, np.newaxis])).batch(publishing_job.BATCH)
        model.fit(data, verbose=0, callbacks=callbacks)
        expected = model.predict(ids, verbose=0)
    if strategy.is_chief:
        if has_one_step:
            assert len(set(steps)) == 4
        else:
            publish.publish()
        readers[0].refresh()
        np.testing.assert_allclose(readers[1](ids), expected, atol=1e-5)
    return {"expected": expected}


@pytest.mark.processes
@pytest.mark.parametrize(
    "layout, mode",
    [
        ("sync22", None),
        *extended(
            ("hybrid22", None),
            ("sync22", "async"),
            ("hybrid21_async", None),
            ("hybrid21_all", None),
        ),
    ],
)
def test_a_model_is_served_while_servers_train_it(layout, mode, tmp_path):
    run(layout, served_while_trained, same=False, folder=str(tmp_path), mode=mode)


@contextlib.contextmanager
def small_files(size):
    """Context in which a file cannot be larger, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.processes
def test_training_goes_on_where_nothing_can_be_published(tmp_path, caplog):
    ids = keras.Input((2,), dtype="int64")
    table = psp.layers.DynamicEmbedding(64, combiner="sum", name="t")
    model = keras.Model(ids, table(ids))
    model.compile("sgd", "mse")
    folder, x, y = tmp_path / "published", np.arange(40).reshape(20, 2), np.ones([20, 64])
    publish = psp.serving.PublishTables(folder, every=1)
    model.fit(x[:4], y[:4], batch_size=2, verbose=0, callbacks=[publish])
    reader = psp.serving.TableReader(folder, poll=None)
    files = sorted(os.listdir(folder))
    with small_files(1500):
        model.fit(x, y, batch_size=10, epochs=2, verbose=0, callbacks=[publish])
    said = [text for text in caplog.messages if "publishes nothing for now" in text]
    assert len(said) == 1 and re.search("rows.npy; the last version.*Make room", said[0])
    assert sorted(os.listdir(folder)) == files and not reader.refresh() and reader.count() == 8
    model.fit(x[:2], y[:2], verbose=0, callbacks=[publish])
    assert reader.refresh()
    np.testing.assert_array_equal(reader.lookup(table.keys), table.table.numpy())

    script = "import sys, time; from keras_psplus.files import ownership as o;"
    script += "o.claim(sys.argv[1], 'a job', 'folder'); print(flush=True); time.sleep(99)"
    args = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(args, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(OSError, match="a job of another job.*Received: folder="):
            model.fit(x, y, verbose=0, callbacks=[publish])
        other.kill()
    model.fit(x, y, verbose=0, callbacks=[publish])


@pytest.mark.extended
@pytest.mark.processes
def test_steps_epochs_and_ends_publish(tmp_path):
    def model_of(*names):
        ids = keras.Input((2,), dtype="int64")
        rows = [psp.layers.DynamicEmbedding(2, combiner="sum", name=name)(ids) for name in names]
        model = keras.Model(ids, keras.layers.Add()(rows) if len(rows) > 1 else rows[0])
        model.compile("sgd", "mse")
        return model

    two, x, y = tmp_path / "two", np.arange(28).reshape(14, 2), np.ones([14, 2])
    model, publish = model_of("a", "b"), psp.serving.PublishTables(two, every=3)
    model.fit(x, y, batch_size=2, verbose=0, callbacks=[publish])
    reader, every = psp.serving.TableReader(two, poll=None), np.arange(28)
    # After steps 3 and 6, and the last one.
    assert (reader.version, reader.step, reader.count("a/table")) == (3, 7, 28)
    found = reader.lookup({"a/table": every, "b/table": every[:5]})
    for name, rows in found.items():
        layer = model.get_layer(name.removesuffix("/table"))
        np.testing.assert_array_equal(rows, layer(every[: len(rows), np.newaxis]))
    with pytest.raises(ValueError, match="Received: name=None"):
        reader.lookup(every)
    # Nothing has changed.
    publish.publish()
    assert not reader.refresh()
    table = model.get_layer("b").table
    table.assign(2 * table.numpy())
    publish.publish()
    assert reader.refresh() and reader.version == 4
    np.testing.assert_array_equal(reader.lookup(every, "b/table"), table.numpy())

    # A job that is started again, and another model's.
    again = psp.serving.PublishTables(two)
    model_of("a", "b").fit(x, y, verbose=0, epochs=2, callbacks=[again])
    assert reader.refresh() and reader.version == 6
    with pytest.raises(ValueError, match="Other tables are published to .*two"):
        model_of("c").fit(x, y, verbose=0, callbacks=[psp.serving.PublishTables(two)])
    with pytest.raises(ValueError, match="of which the model has none"):
        plain = keras.Sequential([keras.layers.Dense(2)])
        plain.compile("sgd", "mse")
        plain.fit(y, y, verbose=0, callbacks=[psp.serving.PublishTables(tmp_path / "none")])
    for every in (0, "batch", True, None):
        with pytest.raises(ValueError, match=f"Received: every={every!r}"):
            psp.serving.PublishTables(tmp_path, every=every)


def train_once(model, x, folder, **arguments):
    """Returns what is served after a step, and the model's own outputs."""
    model.compile("sgd", "mse")
    publish = psp.serving.PublishTables(folder, model=True, **arguments)
    outputs = model(x)
    model.fit(x, np.ones(outputs.shape), verbose=0, callbacks=[publish])
    return psp.serving.TableReader(folder, poll=None).model()(x), model(x)


def test_models_of_all_kinds_are_served(tmp_path):
    keras.utils.set_random_seed(0)
    ids = keras.Input((None,), dtype="int64", name="ids")
    words = keras.Input((), dtype="string", name="words")
    history = psp.layers.DynamicEmbedding(4, mask_value=0, name="history")(ids)
    texts = psp.layers.DynamicEmbedding(3, default="initializer", name="texts")(words)
    place = keras.layers.StringLookup(vocabulary=["a", "b"])(words)
    parts = [keras.layers.LSTM(3)(history), texts, keras.layers.Embedding(3, 2)(place)]
    hidden = keras.layers.BatchNormalization()(keras.layers.Concatenate()(parts))
    hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(4, dtype="bfloat16")(hidden))
    model = keras.Model({"ids": ids, "words": words}, keras.layers.Dense(1)(hidden))
    x = {"ids": tf.constant([[3, 2**40, 0], [1, 0, 0]], tf.int64), "words": tf.constant(["a", "z"])}
    found, expected = train_once(model, x, tmp_path / "functional")
    np.testing.assert_allclose(found, expected, atol=1e-6)
    reader = psp.serving.TableReader(tmp_path / "functional", poll=None)
    new = {"ids": x["ids"] + 7, "words": tf.constant(["new", "b"])}
    np.testing.assert_allclose(reader.model()(new), model(new), atol=1e-6)

    class Noisy(keras.Model):
        """Draws numbers when it is called, and has a table alone."""

        def __init__(self):
            super().__init__()
            self.table, self.seed = psp.layers.DynamicEmbedding(2), keras.random.SeedGenerator(0)

        def call(self, ids, training=False):
            rows = self.table(ids, training=training)
            return rows + 0.0 * keras.random.normal(keras.ops.shape(rows), seed=self.seed)

    x = tf.constant([1, 5], tf.int64)
    signature = [tf.TensorSpec([None], tf.int64)]
    found, expected = train_once(Noisy(), x, tmp_path / "own", signature=signature)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    with pytest.raises(ValueError, match="neither functional nor sequential"):
        train_once(Noisy(), x, tmp_path / "none")
    with pytest.raises(ValueError, match="Received: model=False, signature="):
        psp.serving.PublishTables(tmp_path, signature=signature)

    ids = keras.Input((4,), batch_size=2, dtype="int64")
    rows = psp.layers.DynamicEmbedding(2)(ids)
    model = keras.Model(ids, keras.layers.LSTM(1, stateful=True)(rows))
    x = tf.zeros([2, 4], tf.int64)
    with pytest.raises(ValueError, match="keeps state between its calls.*Received: KeyError"):
        train_once(model, x, tmp_path / "stateful")

    class Counter(keras.layers.Layer):
        def build(self, shape):
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, rows):
            self.calls.assign(self.calls + 1.0)
            return rows

    model = keras.Model(ids, Counter()(psp.layers.DynamicEmbedding(2)(ids)))
    with pytest.raises(ValueError, match="keeps state between its calls.*Received: Attribute"):
        train_once(model, x, tmp_path / "counter")
    nearest = keras.ops.argmax(psp.layers.DynamicEmbedding(3, name="from")(ids), -1)
    model = keras.Model(ids, psp.layers.DynamicEmbedding(2, name="to")(nearest))
    with pytest.raises(ValueError, match="Received: ids from rows of 'from/table'"):
        train_once(model, x, tmp_path / "computed")
