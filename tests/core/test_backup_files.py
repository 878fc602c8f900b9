"""Deleting what BackupAndRestore no longer needs, while other workers delete files of theirs."""

import os
import shutil

import keras

from keras_psplus.core.backup import backup_files


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
