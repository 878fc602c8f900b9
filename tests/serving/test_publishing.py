"""Tables that a job with parameter servers publishes, and the model that it exports."""

import contextlib
import os
import pathlib
import re
import resource
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from tests.serving.publishing_job import WAITED
from tests.support.jobs import run_in_processes

JOB = pathlib.Path(__file__).with_name("publishing_job.py")


def follow(folder):
    """Looks all rows up as soon as a step's version is there."""
    end, reader, seen = time.monotonic() + 300, None, {}
    while time.monotonic() < end and WAITED not in seen:
        time.sleep(0.02)
        if reader is None and (folder / "published" / "manifest.json").exists():
            reader = psp.serving.TableReader(folder / "published", poll=0.05)
        if reader is not None:
            seen.setdefault(reader.step, time.time())
    while not (folder / "model.npz").exists():
        time.sleep(0.02)
    model = np.load(folder / "model.npz")
    # From the end of the step; the first one has the beginning of the reader in it.
    waited = [seen[step] - model["ended"][step - 1] for step in seen if step > 1]
    rows, count = reader.lookup(model["keys"]), reader.count()
    np.savez(folder / "new.npz", rows=rows, count=count, waited=waited)
    reader.close()
    os.rename(folder / "new.npz", folder / "seen.npz")


@pytest.mark.processes
def test_another_process_has_the_rows_of_a_job_with_servers(tmp_path):
    thread = threading.Thread(target=follow, args=[tmp_path], daemon=True)
    thread.start()
    run_in_processes(JOB, tmp_path, workers=2, ps=2, timeout=400)
    thread.join(60)
    model, seen = np.load(tmp_path / "model.npz"), np.load(tmp_path / "seen.npz")
    assert seen["count"] == len(model["keys"]) > 10
    np.testing.assert_array_equal(seen["rows"], model["rows"])

    end = np.load(tmp_path / "end.npz")
    reader = psp.serving.TableReader(tmp_path / "published", poll=None)
    assert reader.version == 8 and reader.step == 8
    np.testing.assert_array_equal(reader.lookup(end["keys"]), end["rows"])
    assert reader.count() == len(end["keys"])
    # Expired ones are gone.
    gone = set(model["keys"].tolist()) - set(end["keys"].tolist())
    assert gone and not reader.lookup(sorted(gone)).any()
    served = tf.saved_model.load(tmp_path / "served" / "1")
    np.testing.assert_allclose(served.serve(end["ids"]), end["predicted"], atol=1e-6)


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
