"""Backups of a folder that count, and the order in which their parts are read and deleted."""

import os
import pathlib
import shutil
import types

import keras
import numpy as np
import pytest

from keras_psplus.core.backup import backup_callback, store
from keras_psplus.core.backup.backup_tables import BackupTables
from keras_psplus.core.backup.fit_progress import FitProgress
from keras_psplus.files.tables import latest


def write(folder, epoch, keeps_previous=False, text=None):
    with store.written(str(folder), {"worker-0.zip": f"of {epoch}"}, 0, keeps_previous) as path:
        pathlib.Path(path, store.WEIGHTS).write_text(text or f"of {epoch}")
        pathlib.Path(path, store.METADATA).write_text(f'{{"epoch": {epoch}}}')
    return pathlib.Path(path)


def epochs(folder):
    return [backup["epoch"] for backup in store.find(str(folder))]


def folders(folder):
    return sorted(path.name for path in folder.glob("backup-*"))


def test_files_that_others_delete_meanwhile_leave_nothing_behind(tmp_path, monkeypatch):
    folder = tmp_path / "backup"
    (folder / "compression").mkdir(parents=True)
    for name in ("worker-0.index", "worker-1.data", "worker-1.index"):
        (folder / "compression" / name).write_text("")
    original, calls = shutil.rmtree, []

    def rmtree(path, *args, **kwargs):
        calls.append(path)
        if len(calls) == 1:
            # As when a file is gone that was in the list of the folder's files.
            os.remove(os.path.join(path, "worker-1.data"))
            raise FileNotFoundError(2, "No such file or directory", "worker-1.data")
        original(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    store.delete(str(folder))
    assert not folder.exists()
    # The folder within it twice, and then the whole.
    assert len(calls) == 3


def test_what_others_have_in_the_folder_stays(tmp_path):
    (tmp_path / "backup-1").mkdir()
    for name in ("mine.txt", "tables-of-mine", "backup-of-mine", "backup-4", ".hidden"):
        (tmp_path / name).write_text("")
    (tmp_path / "backup-1" / "mine.txt").write_text("")
    for epoch in (1, 2):
        write(tmp_path, epoch)
    before = set(os.listdir(tmp_path)) - {"LATEST", "backup-6", store.WEIGHTS}
    store.delete(str(tmp_path))
    assert set(os.listdir(tmp_path)) == before


def test_keras_alone_neither_passes_over_a_backup_nor_deletes_it(tmp_path):
    """It looks for one file, found nothing, trained again and deleted all at its end."""
    (tmp_path / store.WEIGHTS).write_text("of Keras")
    write(tmp_path, 1)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    backup = keras.callbacks.BackupAndRestore(str(tmp_path))
    with pytest.raises(OSError, match=store.WEIGHTS):
        model.fit(np.ones((2, 1)), np.ones((2, 1)), callbacks=[backup], verbose=0)
    assert epochs(tmp_path) == [1]
    (note,) = (tmp_path / store.WEIGHTS).iterdir()
    assert "keras-psplus run --workers 1 train.py" in note.read_text()
    # As a kill leaves it: once before the note is written, once while all is deleted.
    note.unlink()
    write(tmp_path, 2)
    assert epochs(tmp_path) == [2] and note.exists()
    (tmp_path / "LATEST").unlink()
    note.unlink()
    assert epochs(tmp_path) == []
    store.delete(str(tmp_path))
    assert not tmp_path.exists()


def test_a_backup_ends_before_the_tables_that_its_list_names(tmp_path):
    """A kill in between must not leave a state whose tables are gone."""
    folder, found = tmp_path / "backup", []
    write(folder, 1)

    class Tables(BackupTables):
        def note_ended(self, folder, is_kept):
            found.append((os.path.exists(folder), is_kept))

    engine = types.SimpleNamespace(
        progress=FitProgress(),
        strategy=types.SimpleNamespace(is_chief=True),
        backup_writer=types.SimpleNamespace(finish=lambda: None),
        backup_tables=Tables(),
    )
    backup_callback.end(engine, keras.callbacks.BackupAndRestore(str(folder)))
    assert found == [(False, False)]


def test_a_damaged_state_is_passed_over(tmp_path, caplog):
    for epoch in (2, 3, 4):
        last = write(tmp_path, epoch, keeps_previous=True)
    assert epochs(tmp_path) == [4, 3] and len(folders(tmp_path)) == 2
    (last / store.WEIGHTS).write_text("of ?")
    assert epochs(tmp_path) == [3]
    assert "resumes from the one before, at epoch 4" in caplog.text
    # The one that is used has come to be the last, and the damaged one is no backup.
    store.use(str(tmp_path), *store.find(str(tmp_path)))
    write(tmp_path, 5, keeps_previous=True)
    assert epochs(tmp_path) == [5, 3] and last.name not in folders(tmp_path)


def test_only_what_latest_names_is_a_backup(tmp_path):
    whole = write(tmp_path, 1)
    with pytest.raises(KeyError), store.written(str(tmp_path), {}, 0):
        raise KeyError
    with pytest.raises(OSError), store.written(str(tmp_path), {}, 1 << 60):
        pass
    shutil.copytree(whole, tmp_path / "backup-7")
    assert epochs(tmp_path) == [1]
    write(tmp_path, 2)
    assert folders(tmp_path) == latest(str(tmp_path)) == ["backup-8"]
    (tmp_path / "LATEST").write_text("backup-8\nback")
    with pytest.raises(
        OSError, match="damaged .*names no backup. Write .*Received: 'backup-8 back"
    ):
        store.find(str(tmp_path))
    # Nothing is removed by it.
    with pytest.raises(ValueError, match="names no backup"), store.written(str(tmp_path), {}, 0):
        pass
    assert folders(tmp_path) == ["backup-8"]


def test_the_format_before_is_refused(tmp_path):
    for name in (store.WEIGHTS, store.METADATA, "digests.json"):
        (tmp_path / name).write_text('{"epoch": 3}')
    message = "earlier version of keras_psplus.*delete the folder.*Received: digests.json without L"
    with pytest.raises(OSError, match=message):
        store.find(str(tmp_path))
    (tmp_path / "digests.json").unlink()
    # Keras itself writes such ones; the next backup takes their place.
    assert epochs(tmp_path) == [3]
    write(tmp_path, 4)
    assert epochs(tmp_path) == [4] and not (tmp_path / store.WEIGHTS).is_file()


def test_an_ended_fit_is_taken_up_by_the_next_start_of_its_job_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_kept", set())
    monkeypatch.setattr(store.atexit, "register", lambda function: None)
    # Other tests of this process may have had failures.
    monkeypatch.setattr(store.signals, "is_bad", lambda: False)
    monkeypatch.setattr(store.failure, "has_failed", lambda: False)
    monkeypatch.setattr(store.failure, "has_lost_tasks", lambda: False)
    monkeypatch.setenv(store.RESTART_VARIABLE, "0")
    monkeypatch.setenv(store.TOKEN_VARIABLE, "job")
    folder = str(tmp_path / "backup")

    def started(restart, token="job"):
        monkeypatch.setenv(store.RESTART_VARIABLE, restart)
        monkeypatch.setenv(store.TOKEN_VARIABLE, token)
        store._kept.clear()
        store.take(folder, "worker-0")
        store.ownership.release(folder)
        return epochs(folder)

    write(folder, 1)
    assert store.end(folder) and epochs(folder) == []
    # Another call of `fit` in this process.
    store.take(folder, "worker-0")
    store.ownership.release(folder)
    assert epochs(folder) == [] and store.worker_files_in_use(folder) == ["worker-0.zip"]
    assert started("1", "another job") == []
    assert started("1") == [1]
    # The next one counts in its place, also if a kill comes before that is removed.
    assert store.end(folder)
    ended = store._ended_path(folder)
    text = pathlib.Path(ended).read_text()
    write(folder, 2)
    assert not os.path.exists(ended)
    pathlib.Path(ended).write_text(text)
    assert started("2") == [2]
    store._at_exit()
    assert epochs(folder) == [2] and not os.path.exists(ended)
    # A second `fit` that ends takes the place of the first.
    assert store.end(folder)
    store._at_exit()
    assert not os.path.exists(folder)
    # Of another job with this token.
    write(folder, 3)
    assert store.end(folder) and started("0") == []


def test_an_older_state_comes_with_its_own_tables(monkeypatch):
    """Servers have the tables of the newer one when its weights turn out to be damaged."""
    problems, read = ["its weights", None], []
    state = {"has_training": False, "has_manifest": False, "epoch": 0, "path": "path"}
    states = [{**state, "tables": {"stem": name}} for name in ("new", "old")]

    class Tables(BackupTables):
        def read(self, model, folder, content, is_strict):
            read.append(content["stem"])

    monkeypatch.setattr(backup_callback, "_load", lambda *_: problems.pop(0))
    callback = keras.callbacks.BackupAndRestore("backup")
    callback.set_model(keras.Sequential())
    assert backup_callback.load_first(Tables(), callback, states, [], True) == 1
    assert read == ["old"]
