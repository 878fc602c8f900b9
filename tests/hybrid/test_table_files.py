"""Files of tables: written by some servers, read by others, by rows, and never taken for whole."""

import contextlib
import os
import resource
import shutil
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keras_psplus.core.backup.backup_tables import BackupTables, read_here
from keras_psplus.files import tables as shard_files
from keras_psplus.files.tables import LIST, read_list, rows_of, write_list
from keras_psplus.hybrid import TableFiles
from keras_psplus.hybrid.server.server_files import ServerFiles
from keras_psplus.hybrid.server.shard import TableShard
from keras_psplus.tables.row_optimizer import config_of

ROWS, DIM, STEM = 37, 3, "tables-1"
NAMES = "users/embeddings", "items/embeddings"


def value(key, slot):
    return np.arange(ROWS * DIM, dtype="float32").reshape(ROWS, DIM) + 1000 * key + 100 * slot


def server_of(index, servers, rows=ROWS):
    """The files of a server with two tables, of which one has an optimizer with a slot."""
    shards = {}
    for key, name in enumerate(NAMES):
        spec = {"key": key, "name": name, "rows": rows, "dim": DIM, "initializer": None}
        shards[key] = TableShard(spec, index, servers, None, None, replicas=2, sync=False)
    shards[1].set_optimizer(config_of(keras.optimizers.Adagrad(), None, None, None), 1, 1)
    return ServerFiles(shards, {"server": index, "servers": servers}), shards


def variables(shards):
    return [(0, 0, shards[0].weights), (1, 0, shards[1].weights), (1, 1, shards[1].slots[0])]


def save(files, folder, stem):
    files.begin_save(folder, stem)
    return files.end_save()


def write(folder, servers, stem=STEM):
    for index in range(servers):
        files, shards = server_of(index, servers)
        for key, slot, variable in variables(shards):
            variable.assign(value(key, slot)[index::servers])
        save(files, str(folder), stem)
    tables = [
        {"name": name, "key": key, "rows": ROWS, "dim": DIM, "optimizer": "Adagrad", "slots": key}
        for key, name in enumerate(NAMES)
    ]
    write_list(str(folder), {"stem": stem, "servers": servers, "tables": tables})


@pytest.fixture(scope="module", params=[1, 3])
def written(request, tmp_path_factory):
    """A folder that one or three servers have written, in slices of two rows and small files."""
    folder = tmp_path_factory.mktemp("tables")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_files, "_SLICE_BYTES", 2 * 4 * DIM)
        patch.setattr(shard_files, "_FILE_BYTES", 7 * 4 * DIM)
        write(folder, request.param)
    return folder, request.param


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 6])
def test_any_number_of_servers_reads_what_others_have_written(written, servers, monkeypatch):
    folder, before = written
    monkeypatch.setattr(shard_files, "_SLICE_BYTES", 5 * 4 * DIM)
    for index in range(servers):
        files, shards = server_of(index, servers)
        files.load(str(folder), [STEM], before, [(0, 0, 0), (1, 1, 1)])
        for key, slot, variable in variables(shards):
            np.testing.assert_array_equal(variable, value(key, slot)[index::servers])


def test_tables_are_read_by_chunks(written):
    files = TableFiles(written[0])
    assert files.names == list(NAMES)
    assert files.shape(NAMES[1]) == (ROWS, DIM)
    assert [files.slots(name) for name in NAMES] == [0, 1]
    for rows in (None, 1, 5, 100):
        chunks = list(files.chunks(NAMES[1], rows, slot=0))
        assert [first for first, _ in chunks] == list(
            np.cumsum([0, *(len(part) for _, part in chunks[:-1])])
        )
        np.testing.assert_array_equal(np.concatenate([part for _, part in chunks]), value(1, 1))
    assert len(list(files.chunks(NAMES[0], 5))) == 8


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_rows_are_read(written, data):
    first = data.draw(st.integers(0, ROWS))
    count = data.draw(st.integers(0, ROWS - first))
    rows = TableFiles(written[0]).read(NAMES[0], first, count)
    np.testing.assert_array_equal(rows, value(0, 0)[first : first + count])


def test_what_is_not_there_is_refused_by_name(written, tmp_path):
    files = TableFiles(written[0])
    with pytest.raises(ValueError, match="no such table.*users/embeddings.*Received: 'other'"):
        files.read("other")
    with pytest.raises(ValueError, match="rows 0 to 36. Received: first=30, count=8"):
        files.read(NAMES[0], 30, 8)
    with pytest.raises(ValueError, match="has 0 variables of its shape. Received: slot=0"):
        files.read(NAMES[0], slot=0)
    with pytest.raises(ValueError, match=f"{LIST} is missing"):
        TableFiles(tmp_path)
    reader, _ = server_of(0, 2)
    with pytest.raises(OSError, match="cannot read .*Received: .*tables-2"):
        reader.load(str(written[0]), ["tables-2"], 2, [(0, 0, 0)])


@pytest.mark.parametrize("written", [1], indirect=True)
def test_no_flipped_bit_is_read(written, tmp_path):
    folder, before = written
    # The last one has what only a server that is started again reads.
    paths = sorted(folder.glob(f"{STEM}-0-of-1.data*"))[:-1]
    for number in range(40):
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        path = tmp_path / paths[number % len(paths)].name
        content = bytearray(path.read_bytes())
        content[number * len(content) // 40] ^= 4
        path.write_bytes(content)
        files, _ = server_of(0, 1)
        with pytest.raises(OSError, match="cannot read its part of what is saved in"):
            files.load(str(tmp_path), [STEM], before, [(0, 0, 0), (1, 1, 1)])


def test_more_servers_than_rows(tmp_path):
    for index in range(3):
        files, shards = server_of(index, 3, rows=2)
        shards[0].weights.assign(np.full([rows_of(2, index, 3), DIM], index))
        save(files, str(tmp_path), STEM)
    files, shards = server_of(0, 1, rows=2)
    files.load(str(tmp_path), [STEM], 3, [(0, 0, 0)])
    np.testing.assert_array_equal(shards[0].weights, [[0] * DIM, [1] * DIM])


@contextlib.contextmanager
def full_disk():
    """No file grows beyond a size, as if there was no more space."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_what_was_there(tmp_path):
    write(tmp_path, 1)
    before = sorted(os.listdir(tmp_path))
    spec = {"key": 0, "name": NAMES[0], "rows": 1 << 18, "dim": 4, "initializer": None}
    shards = {0: TableShard(spec, 0, 1, None, None, replicas=1, sync=True)}
    files = ServerFiles(shards, {"server": 0, "servers": 1})
    with full_disk(), pytest.raises(OSError, match="cannot write .*Free space there.*Received: "):
        save(files, str(tmp_path), "tables-2")
    assert sorted(os.listdir(tmp_path)) == before
    np.testing.assert_array_equal(TableFiles(tmp_path).read(NAMES[0]), value(0, 0))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    files, _ = server_of(0, 1)
    with pytest.raises(OSError, match=f"cannot write .*{tmp_path}/file/tables.*Received: "):
        save(files, str(tmp_path / "file" / "tables"), STEM)
    with pytest.raises(OSError, match="cannot write "):
        shard_files.check_writable(str(tmp_path / "file" / "tables"), "ps-0")


def test_a_server_that_takes_another_ones_place_counts_what_is_lost(tmp_path):
    numbers = tf.constant([1.0])
    files, shards = server_of(0, 1)

    def push(shard, replica, step, part=0, last=1):
        header = tf.constant([replica, step, part, last, 0, step], tf.int64)
        rows = tf.ones([1, DIM])
        shard.methods()["push1"](header, numbers, tf.constant([0]), rows)

    for step in range(3):
        push(shards[1], 0, step)
    push(shards[1], 1, 0)
    assert shards[1].missing_updates.counted() == (0, True)
    save(files, str(tmp_path), STEM)
    saved = shards[1].weights.numpy()
    anew, shards = server_of(0, 1)
    anew.load(str(tmp_path), [STEM], 1, [(0, 0, 0), (1, 1, 1)])
    anew.take_up(str(tmp_path), STEM, [(0, 0), (1, 1)])
    np.testing.assert_array_equal(shards[1].weights, saved)
    assert shards[1].missing_updates.counted() == (0, False)
    # One that the rows have seen comes again, and is none.
    push(shards[1], 0, 2)
    assert shards[1].missing_updates.counted() == (0, False)
    np.testing.assert_array_equal(shards[1].weights, saved)
    # Updates 3 and 4 are lost; of the other replica 1 to 3, and the first part of 4.
    push(shards[1], 0, 5)
    push(shards[1], 1, 4, part=1)
    assert shards[1].missing_updates.counted() == (6, True)
    push(shards[1], 0, 6)
    assert shards[1].missing_updates.counted() == (6, True)


def test_old_files_are_deleted_and_others_kept(tmp_path):
    write(tmp_path, 2, "tables-1")
    write(tmp_path, 2, "tables-2")
    (tmp_path / "mine.txt").write_text("")
    (tmp_path / "tables-1-of-mine").write_text("")
    (tmp_path / "tables-best-0-of-2.index").write_text("")
    server_of(0, 2)[0].keep(str(tmp_path), ["tables-2"])
    kept = os.listdir(tmp_path)
    foreign = {"mine.txt", "tables-1-of-mine", "tables-best-0-of-2.index"}
    own = {name for name in kept if name.startswith("tables-")} - foreign
    assert {name.split("-0")[0] for name in own} <= {
        "tables-2",
        "tables-2-1-of-2.data",
        "tables-2-1-of-2.index",
    }
    assert {LIST, *foreign} < set(kept)
    assert TableFiles(tmp_path).read(NAMES[0]).shape == (ROWS, DIM)


def test_a_folder_that_another_task_deletes_at_the_same_moment_holds_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tf.io.gfile, "isdir", lambda path: True)
    assert shard_files.find(str(tmp_path / "gone"), "*") == []


def test_a_worker_reads_tables_of_a_backup_that_lie_with_it_now(written):
    folder, _ = written
    keras.backend.clear_session()
    embedding = keras.layers.Embedding(ROWS, DIM)
    model = keras.Sequential([keras.Input((2,), dtype="int32"), embedding, keras.layers.Dense(1)])
    listed = read_list(str(folder))
    for entry, place in zip(listed["tables"], (None, 0), strict=True):
        entry["place"] = place

    def read(optimizer, is_strict):
        model.compile(optimizer)
        optimizer.build(model.trainable_variables)
        with BackupTables().set_aside(model, listed) as here:
            assert embedding.embeddings.shape == (0, DIM)
            aside = [v.shape for v in optimizer.variables if tuple(v.shape) == (0, DIM)]
            assert model.layers[-1].kernel.shape == (DIM, 1)
        assert embedding.embeddings.shape == (ROWS, DIM)
        problem = read_here(str(folder), listed, here, is_strict)
        np.testing.assert_array_equal(embedding.embeddings.numpy(), value(1, 0))
        return problem, aside, [v for v in optimizer.variables if v.shape == (ROWS, DIM)]

    problem, aside, (accumulator,) = read(keras.optimizers.Adagrad(), True)
    assert problem is None and len(aside) == 1
    np.testing.assert_array_equal(accumulator.numpy(), value(1, 1))
    # The backup of a later call of `fit` may be one of another optimizer.
    assert read(keras.optimizers.SGD(), False)[0] is None
    assert "has 1 slots of items/embeddings" in read(keras.optimizers.SGD(), True)[0]
