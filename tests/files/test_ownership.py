"""Folders with one owner at a time."""

import json
import os
import subprocess
import sys

import pytest

from keras_psplus.files import ownership
from tests.support.jobs import environment

CLAIM = """
import sys, time
from keras_psplus.files import ownership
ownership.claim(sys.argv[1], "worker-0", "backup_dir")
print("claimed", flush=True)
time.sleep(100)
"""


@pytest.mark.processes
def test_a_folder_has_one_owner_until_that_has_ended(tmp_path):
    folder, script = tmp_path / "backup", tmp_path / "script.py"
    script.write_text(CLAIM)
    command = [sys.executable, str(script), str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, text=True, env=environment()) as other:
        try:
            assert other.stdout.readline() == "claimed\n"
            with pytest.raises(ownership.FolderInUseError) as error:
                ownership.claim(folder, "worker-0", "backup_dir")
            assert f"worker-0 of another job (process {other.pid} on " in str(error.value)
            assert str(error.value).endswith(f"Received: backup_dir='{folder}'")
        finally:
            other.kill()
    # It was killed, and left its name.
    ownership.claim(folder, "worker-0", "backup_dir")
    assert json.loads((folder / ownership.FILE).read_text())["process"] == os.getpid()
    ownership.claim(folder, "worker-0", "backup_dir")
    ownership.release(folder)
    assert not any(folder.iterdir())


def test_an_owner_on_another_machine_blocks_as_long_as_it_shows_life(tmp_path, monkeypatch):
    monkeypatch.setattr(ownership, "_BEAT_SECONDS", 0.2)
    ownership.claim(tmp_path, "worker-0", "backup_dir")
    facts = json.loads((tmp_path / ownership.FILE).read_text())
    ownership.release(tmp_path)
    (tmp_path / ownership.FILE).write_text(json.dumps({**facts, "machine": "other", "id": "1"}))
    ownership.claim(tmp_path, "worker-0", "backup_dir")
    (tmp_path / ownership.FILE).write_text(json.dumps({**facts, "id": "2"}))
    with pytest.raises(ownership.FolderInUseError):
        ownership.check(tmp_path)
    ownership.release(tmp_path)
