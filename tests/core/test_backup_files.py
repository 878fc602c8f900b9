"""Order in which parts of a backup are read and deleted, and what others delete meanwhile."""

import os
import pathlib
import shutil
import types

import keras

from keras_psplus.core.backup import backup_callback, backup_files
from keras_psplus.core.backup.backup_tables import BackupTables
from keras_psplus.core.backup.fit_progress import FitProgress


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
    backup_files.delete(keras.callbacks.BackupAndRestore(str(folder)))
    assert not folder.exists()
    # The folder within it twice, and then the whole.
    assert len(calls) == 3


def test_a_backup_ends_before_the_tables_that_its_list_names(tmp_path):
    """A kill in between must not leave a state whose tables are gone."""
    folder, found = tmp_path / "backup", []
    folder.mkdir()
    (folder / "latest.weights.h5").write_text("")

    class Tables(BackupTables):
        def note_ended(self, folder, kept):
            found.append((os.path.exists(folder), kept))

    engine = types.SimpleNamespace(
        progress=FitProgress(),
        strategy=types.SimpleNamespace(is_chief=True),
        backup_writer=types.SimpleNamespace(finish=lambda: None),
        backup_tables=Tables(),
    )
    backup_callback.end(engine, keras.callbacks.BackupAndRestore(str(folder)))
    assert found == [(False, None)]


def test_a_damaged_state_is_passed_over(tmp_path, caplog):
    callback = keras.callbacks.BackupAndRestore(str(tmp_path), double_checkpoint=True)
    for epoch in (3, 4):
        with backup_files.written(callback, {"worker-0.zip": "digest"}, 0) as folder:
            pathlib.Path(folder, "latest.weights.h5").write_text(f"of {epoch}")
            pathlib.Path(folder, "training_metadata.json").write_text(f'{{"epoch": {epoch}}}')
    assert [state["epoch"] for state in backup_files.find(callback)] == [4, 3]
    pathlib.Path(tmp_path, "latest.weights.h5").write_text("of ?")
    assert [state["epoch"] for state in backup_files.find(callback)] == [3]
    assert "resumes from the one before, at epoch 4" in caplog.text


def test_an_older_state_comes_with_its_own_tables(tmp_path, monkeypatch):
    """Servers have the tables of the newer one when its weights turn out to be damaged."""
    problems, read, state = ["its weights", None], [], {"has_training": False, "epoch": 0}
    states = [{**state, "tables": {"stem": name}} for name in ("new", "old")]

    class Tables(BackupTables):
        def read(self, model, folder, content, is_strict):
            read.append(content["stem"])

    monkeypatch.setattr(backup_callback, "_load", lambda *_: problems.pop(0))
    callback = keras.callbacks.BackupAndRestore(str(tmp_path))
    assert backup_callback.load_first(Tables(), callback, states, [], True) == 1
    assert read == ["old"]
