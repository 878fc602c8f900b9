"""Files that appear whole: who may replace what, and what a killed writer leaves."""

import os
import pathlib
import subprocess
import sys
import threading

import pytest
import tensorflow as tf

from keras_psplus.files import atomic
from tests.support.jobs import environment


def fill(path, text, names=("saved_model.pb", "variables/data")):
    """Writes a folder of files that all have the same text."""
    for name in names:
        file = os.path.join(path, name)
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(file, "w") as f:
            f.write(text)


def content(folder):
    files = [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def write_file(target, text, task="worker-0"):
    with atomic.written(target, task) as path, open(path, "w") as file:
        file.write(text)


def write_folder(target, text, *names, task="worker-0"):
    with atomic.written(target, task) as path:
        fill(path, text, *names)


def test_a_file_is_replaced_and_a_failure_changes_nothing(tmp_path):
    target = tmp_path / "model.keras"
    write_file(target, "one")
    write_file(target, "two")
    with pytest.raises(ZeroDivisionError), atomic.written(target) as path:
        assert os.path.basename(path) == "model.keras"
        with open(path, "w") as file:
            file.write("thr")
        _ = 1 / 0
    assert content(tmp_path) == {"model.keras": "two"}


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "latest.keras").symlink_to(tmp_path / "models" / "1.keras")
    for text in ("one", "two"):
        write_file(tmp_path / "latest.keras", text)
    assert (tmp_path / "latest.keras").is_symlink()
    assert content(tmp_path / "models") == {"1.keras": "two"}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_replaced_and_what_others_have_put_there_stays(
    tmp_path, monkeypatch, can_exchange
):
    if not can_exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda *paths: False)
    target = tmp_path / "exported"
    write_folder(target, "one")
    before = target.stat().st_ino
    write_folder(target, "two")
    assert (target.stat().st_ino != before) == can_exchange
    assert content(target) == {"saved_model.pb": "two", "variables/data": "two"}
    fill(target, "mine", ["notes.txt", "variables/mine"])
    write_folder(target, "three")
    assert content(target) == {
        "saved_model.pb": "three",
        "variables/data": "three",
        "notes.txt": "mine",
        "variables/mine": "mine",
    }
    assert os.listdir(tmp_path) == ["exported"]


def test_a_folder_that_is_a_disk_of_its_own_stays(tmp_path, monkeypatch):
    target = tmp_path / "disk"
    target.mkdir()
    fill(target, "mine", ["notes.txt"])
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(target))
    seen = []
    with atomic.written(target) as path:
        seen += os.listdir(tmp_path)
        fill(path, "one")
    assert seen == ["disk"]
    assert content(target) == {
        "notes.txt": "mine",
        "saved_model.pb": "one",
        "variables/data": "one",
    }


def test_what_is_written_beside_the_path_comes_first(tmp_path, monkeypatch):
    order, replace = [], os.replace

    def note(source, target):
        order.append(os.path.basename(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", note)
    with atomic.written(tmp_path / "a.weights.json", "worker-0") as path:
        fill(os.path.dirname(path), "one", ["a.weights.json", "b_0.weights.h5", "b_1.weights.h5"])
    assert order == ["b_0.weights.h5", "b_1.weights.h5", "a.weights.json"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_writers_of_the_same_target_do_not_break_each_other(tmp_path, kind):
    target, stop, problems = tmp_path / "target", threading.Event(), []

    def work(number):
        try:
            while not stop.is_set():
                if kind == "file":
                    write_file(target, f"{number}" * 1000, f"worker-{number}")
                    assert set(target.read_text()) < set("0123")
                else:
                    write_folder(target, f"{number}", task=f"worker-{number}")
        except BaseException as error:
            problems.append(error)
            stop.set()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    stop.wait(0.5)
    stop.set()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    assert os.listdir(tmp_path) == ["target"]
    if kind == "folder":
        whole = content(target)
        assert set(whole) == {"saved_model.pb", "variables/data"}
        assert len(set(whole.values())) == 1


def test_a_folder_that_another_writer_has_put_there_meanwhile_stays(tmp_path):
    target = tmp_path / "exported"
    # The first time there is none before, then there is one.
    for text in ("one", "two"):
        with atomic.written(target, "worker-0") as path:
            fill(path, "of the slow one")
            write_folder(target, text, task="worker-1")
            there = target.stat().st_ino
        assert target.stat().st_ino == there
        assert content(target) == {"saved_model.pb": text, "variables/data": text}
    write_folder(target, "three")
    assert set(content(target).values()) == {"three"}
    assert os.listdir(tmp_path) == ["exported"]


def left_by(target, task, process, machine=None):
    """The folder that a writer has left."""
    name = atomic._temporary_name(os.path.realpath(target), task)
    *start, old_machine, _, number = name.rsplit("-", 3)
    path = os.path.join(
        os.path.dirname(target), "-".join([*start, machine or old_machine, str(process), number])
    )
    fill(path, "half", [os.path.basename(target)])
    return os.path.basename(path)


def test_what_killed_writers_have_left_is_deleted(tmp_path):
    target, other = str(tmp_path / "model.keras"), str(tmp_path / "epoch-3.keras")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    gone = [
        left_by(target, "worker-0", ended.pid),
        # Of a process of this machine it is known that it has ended, whatever it wrote.
        left_by(other, "worker-1", ended.pid),
        # The same process id may come again, in a container always.
        left_by(other, "worker-1", os.getpid()),
        left_by(target, "worker-0", 1, "0" * 8),
    ]
    stays = [
        left_by(target, "worker-0", os.getppid()),
        left_by(target, "worker-1", 1, "0" * 8),
        left_by(other, "worker-0", 1, "0" * 8),
    ]
    (tmp_path / ".keras_psplus-mine").mkdir()
    write_file(target, "one", "worker-0")
    assert set(os.listdir(tmp_path)) == {"model.keras", ".keras_psplus-mine", *stays}
    assert not set(gone) & set(os.listdir(tmp_path))


def test_a_process_without_a_task_deletes_nothing_of_other_machines(tmp_path):
    target = str(tmp_path / "model.keras")
    stays = left_by(target, None, 1, "0" * 8)
    write_file(target, "one", None)
    assert set(os.listdir(tmp_path)) == {"model.keras", stays}


KILLED = """
import os, signal, sys
from keras_psplus.files import atomic
with atomic.written(sys.argv[1], "worker-0") as path:
    open(path, "w").write("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_a_killed_write_is_cleared_by_the_next_one(tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "folder"
    script.write_text(KILLED)
    folder.mkdir()
    target = folder / "model.keras"
    killed = subprocess.run([sys.executable, str(script), str(target)], env=environment())
    assert killed.returncode == -9
    (left,) = os.listdir(folder)
    assert left.startswith(".keras_psplus-worker-0-")
    write_file(target, "whole")
    assert content(folder) == {"model.keras": "whole"}


def test_what_tensorflow_alone_reaches_is_copied_there():
    with atomic.uploaded("ram://atomic/exported/") as path:
        fill(path, "two")
    with atomic.uploaded("ram://atomic/a.weights.json") as path:
        fill(os.path.dirname(path), "two", ["a.weights.json", "a_0.weights.h5"])
    for name in ("exported/variables/data", "exported/saved_model.pb", "a_0.weights.h5"):
        with tf.io.gfile.GFile(f"ram://atomic/{name}") as file:
            assert file.read() == "two"
