"""Versions of a model in a folder: what a reader finds, whatever happens to the writer."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.files import integrity
from keras_psplus.tables import keys as initial_rows
from keras_psplus.tables import versions
from keras_psplus.tables.snapshot import Changes
from keras_psplus.tables.versions import VersionWriter
from tests.support.jobs import environment, wait_for

DIM = 2
SPEC = {
    "dim": DIM,
    "default": "zeros",
    "initializer": initial_rows.check_initializer(keras.initializers.RandomUniform(-1, 1, seed=3)),
}


def changes(keys, gone=(), is_whole=False, value=1.0):
    keys = np.array(sorted(keys), np.int64)
    rows = np.stack([keys * value, keys + value], 1).astype(np.float32).reshape(-1, DIM)
    return Changes(keys, rows, np.array(gone, np.int64), is_whole, ())


@pytest.fixture(scope="module")
def save(tmp_path_factory):
    """Function that writes a model, which adds a weight to rows of distinct ids."""
    module, folder = tf.Module(), tmp_path_factory.mktemp("model") / "saved"
    specs = tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.float32)
    rows = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DIM], tf.float32)

    @tf.function(input_signature=specs)
    def keys(ids, weight):
        return {"t": ids}

    @tf.function(input_signature=[*specs, *rows])
    def serve(ids, weight, keys, rows):
        found = tf.equal(ids[:, tf.newaxis], keys)
        return tf.matmul(tf.cast(found, tf.float32), rows) + weight

    module.keys, module.serve = keys, serve
    tf.saved_model.save(module, folder)
    return lambda path: shutil.copytree(folder, path)


class Published:
    """A folder with versions, and the rows that they come to."""

    def __init__(self, folder, save=None):
        self.folder, self.rows = str(folder), {}
        self.writer = VersionWriter(self.folder, {"t": SPEC}, save)

    def write(self, *args, weight=0.0, **kwargs):
        one = changes(*args, **kwargs)
        rows = {} if one.is_whole else dict(self.rows)
        for key in one.gone.tolist():
            rows.pop(key, None)
        rows |= dict(zip(one.keys.tolist(), one.rows))
        self.next = rows
        self.writer.write([one], step=7, weights=[np.float32(weight)])
        self.rows = rows


def check(reader, rows, keys=range(-5, 400), weight=None):
    keys = np.array(list(keys))
    expected = np.array([rows.get(key, np.zeros(DIM)) for key in keys.tolist()], np.float32)
    np.testing.assert_array_equal(reader.lookup(keys), expected)
    assert reader.count() == len(rows)
    if weight is not None:
        np.testing.assert_array_equal(reader.model()(keys), expected + np.float32(weight))


def test_a_reader_follows_versions(tmp_path):
    random, published = np.random.default_rng(0), Published(tmp_path)
    published.write(range(0, 300, 2), is_whole=True)
    reader = psp.serving.TableReader(tmp_path, poll=None)
    check(reader, published.rows)
    for i in range(12):
        keys = random.integers(0, 400, 20 if i % 3 else 90)
        published.write(set(keys.tolist()), gone=random.integers(0, 400, 10), value=i)
        assert reader.refresh() and not reader.refresh()
        check(reader, published.rows)
    check(psp.serving.TableReader(tmp_path, poll=None), published.rows)
    assert len(reader._latest.tables["t"].every) < 8
    before = reader.version
    # One whose files the writer deletes meanwhile has the last generation still.
    for value in (2.0, 3.0):
        published.write([1, 2], is_whole=True, value=value)
        assert reader.refresh()
        check(reader, published.rows)
    assert reader.version == before + 2
    assert len([n for n in os.listdir(tmp_path) if n.endswith(".npy")]) == 4
    np.testing.assert_array_equal(reader.lookup([[1, 9]]).shape, [1, 2, DIM])


def test_lookups_have_one_version_while_others_come(tmp_path):
    published = Published(tmp_path)
    keys = np.arange(50)
    published.write(keys, is_whole=True, value=0.0)
    reader, wrong, end = psp.serving.TableReader(tmp_path, poll=0.001), [], threading.Event()

    def look():
        while not end.is_set():
            rows = reader.lookup(keys)[1:]
            if len(np.unique(rows[:, 0] / keys[1:])) != 1:
                wrong.append(rows)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for value in range(1, 20):
        published.write(keys, value=float(value), is_whole=value % 5 == 0)
    end.set()
    for thread in threads:
        thread.join(60)
    reader.close()
    reader.refresh()
    check(reader, published.rows)
    assert not wrong


ENDS = """
import sys
import tensorflow as tf
import keras_psplus as psp
from keras_psplus.tables.reader import TableReader


def refresh(self):
    for _ in range(20):
        tf.function(lambda: tf.zeros([2])).get_concrete_function()


TableReader.refresh = refresh
reader = psp.serving.TableReader(sys.argv[1], poll=1e-4)
refresh(reader)
"""


@pytest.mark.processes
def test_a_process_ends_well_while_a_version_is_read(tmp_path):
    Published(tmp_path / "published").write([1], is_whole=True)
    # By a new interpreter, which ends as one does.
    command = [sys.executable, "-c", ENDS, str(tmp_path / "published")]
    subprocess.run(command, check=True, timeout=120, env=environment())


class Killed(BaseException):
    pass


@contextlib.contextmanager
def killed_at(point):
    """Context in which the process dies before one of the calls that change the disk."""
    left = [point]

    def dying(original):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return original(*args, **kwargs)

        return call

    calls = (np, "save"), (os, "fsync"), (os, "replace"), (os, "unlink")
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in calls:
            patch.setattr(owner, name, dying(getattr(owner, name)))
        yield


@pytest.mark.parametrize("is_whole, has_new_model", [(False, True), (True, False)])
def test_a_kill_at_any_point_leaves_a_whole_version(tmp_path, save, is_whole, has_new_model):
    """As many points as there are: writes, waits for the disk, renames, deletions."""
    points, survived, new = 0, False, 0
    while not survived:
        folder = tmp_path / f"{points}"
        folder.mkdir()
        published = Published(folder, save)
        published.write(range(9), is_whole=True, weight=1)
        published.write([1, 30], gone=[2], weight=2)
        published.write([4], is_whole=True, weight=3)
        reader = psp.serving.TableReader(folder, poll=None)
        check(reader, published.rows, weight=3)
        if has_new_model:
            published.writer.model = None
        try:
            with killed_at(points):
                published.write([1, 5], gone=[4], is_whole=is_whole, value=3.0, weight=4)
            survived = True
        except Killed:
            points += 1
        again = psp.serving.TableReader(folder, poll=None)
        new += again.version == 4
        rows = published.next if again.version == 4 else published.rows
        check(again, rows, weight=again.version)
        reader.refresh()
        check(reader, rows, weight=again.version)
        # Another process goes on.
        other = Published(folder, save)
        assert other.writer.needs_whole
        other.write([8], is_whole=True, weight=0.5)
        reader.refresh()
        check(reader, other.rows, weight=0.5)
        assert len([name for name in os.listdir(folder) if "-weights" in name]) == 2
    assert points >= 9 and new >= 2


def test_all_is_written_again_once_changes_are_many(tmp_path, monkeypatch):
    published = Published(tmp_path)
    assert published.writer.needs_whole
    published.write(range(5000), is_whole=True)
    published.write(range(2000))
    assert not published.writer.needs_whole
    published.write(range(600))
    assert published.writer.needs_whole
    monkeypatch.setattr("keras_psplus.tables.snapshot._MOST_FILES", 2)
    published.write(range(5000), is_whole=True)
    published.write([1])
    assert published.writer.needs_whole


def rewrite(folder, change):
    """Changes the list of versions, and its digest."""
    path = folder / versions.NAME
    content = json.loads(path.read_text())
    content.pop("sha256")
    change(content)
    path.write_text(integrity.to_json(content))


def test_what_is_damaged_or_does_not_fit_is_refused(tmp_path, caplog):
    with pytest.raises(FileNotFoundError, match="No table is published in"):
        psp.serving.TableReader(tmp_path)
    published = Published(tmp_path)
    published.write(range(9), is_whole=True)
    published.write([3], value=2.0)
    with pytest.raises(ValueError, match=r"Other tables are published.*Received: \[\('u', 2\)\]"):
        VersionWriter(str(tmp_path), {"u": SPEC})
    reader = psp.serving.TableReader(tmp_path, poll=None)
    for act in (lambda: reader.lookup([1], "u"), lambda: reader.lookup({"u": [1]})):
        with pytest.raises(ValueError, match="There are other tables in .*Received: name='u'"):
            act()
    with pytest.raises(ValueError, match="published without their model.*Received: version 2"):
        reader.model()
    rows = dict(published.rows)
    whole = (tmp_path / versions.NAME).read_text()
    published.write([5], value=4.0)
    latest = (tmp_path / versions.NAME).read_text()

    def refused(match):
        with pytest.raises(ValueError, match=match):
            psp.serving.TableReader(tmp_path, poll=None)
        with pytest.raises(ValueError, match=match):
            reader.refresh()
        # Lookups have the last good version.
        check(reader, rows)

    rewrite(tmp_path, lambda content: content["versions"].pop(1))
    refused("does not fit the one before it.*Received: version 3, which follows 2, after 1")
    (tmp_path / versions.NAME).write_text(latest.replace('"version": 3', '"version": 4'))
    refused("is damaged")
    (tmp_path / versions.NAME).write_text(latest)
    rewrite(tmp_path, lambda content: content.update(format=9))
    refused("Received: format=9")
    for change in (
        lambda content: content.update(versions=[]),
        lambda content: content.pop("tables"),
        lambda content: content["versions"][0]["tables"].clear(),
        lambda content: content["versions"].append(7),
        lambda content: content.update(model={}),
    ):
        (tmp_path / versions.NAME).write_text(latest)
        rewrite(tmp_path, change)
        refused(f"in {tmp_path}.*is damaged")
    for make in (os.mkfifo, os.mkdir):
        (tmp_path / versions.NAME).unlink()
        make(tmp_path / versions.NAME)
        for act in (reader.refresh, lambda: VersionWriter(str(tmp_path), {"t": SPEC})):
            with pytest.raises(OSError, match="manifest.json, cannot be read.*it is a (FIFO|fol)"):
                act()
        check(reader, rows)
    os.rmdir(tmp_path / versions.NAME)
    (tmp_path / versions.NAME).write_text(latest)
    path = tmp_path / versions.file_name(3, 0, "rows")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    refused("Version 3 of what is published in .* is damaged.*0-rows.npy is not as.*SHA-256")
    path.unlink()
    refused("is missing")
    path.write_bytes(content)
    (tmp_path / versions.NAME).write_text(whole)
    assert not reader.refresh()
    (tmp_path / versions.NAME).write_text(latest)
    assert reader.refresh()
    check(reader, published.rows)


def test_a_reader_keeps_its_version_where_files_of_a_model_are_damaged(tmp_path, save, caplog):
    published = Published(tmp_path, save)
    published.write(range(9), is_whole=True, weight=1)
    reader = psp.serving.TableReader(tmp_path, poll=None)
    former, served = dict(published.rows), reader.model()
    check(reader, former, weight=1)
    published.writer.model = None
    published.write([3], gone=[4], value=2.0, weight=2)
    follower = None
    for name in ("2-weights.bin", "2-model/saved_model.pb", "2-0-rows.npy"):
        path = tmp_path / f"0000000{name}"
        whole = path.read_bytes()

        def refused(match):
            for act in (reader.refresh, lambda: psp.serving.TableReader(tmp_path, None).model()):
                with pytest.raises(ValueError, match=match):
                    act()
            check(reader, former)
            np.testing.assert_array_equal(served([2, 99]), [[3, 4], [1, 1]])

        for damaged in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
            path.write_bytes(damaged)
            refused(f"2 of what is published.*damaged.*{re.escape(str(path))} is not as it was")
        path.unlink()
        refused(f"A file of the tables in .* is missing.*{re.escape(str(path))}")
        if follower is None:
            follower = psp.serving.TableReader(tmp_path, poll=0.01)
            with pytest.raises(ValueError, match="is missing"):
                follower.model()
            assert follower.version == 2
        path.write_bytes(whole)
    assert reader.refresh() and served.version == 2
    check(reader, published.rows, weight=2)
    # By itself, with a warning, once.
    follower.model()
    (tmp_path / "manifest.json").write_text("{}")
    wait_for(lambda: "stays at version 2" in caplog.text)
    follower.close()
    check(follower, published.rows)
    assert caplog.text.count("stays at version 2") == 1


def test_missing_keys_are_what_the_layer_says(tmp_path):
    spec = {**SPEC, "default": "initializer"}
    VersionWriter(str(tmp_path), {"t": spec}).write([changes([7], is_whole=True)], 1)
    found = psp.serving.TableReader(tmp_path, poll=None).lookup([7, 8])
    expected = initial_rows.maker(spec)(np.array([8])).numpy()[0]
    np.testing.assert_array_equal(found, [[7, 8], expected])
