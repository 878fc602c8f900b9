"""Iterators are destroyed by threads of their own, whoever drops them last."""

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import tensorflow as tf

from keras_psplus.core import data_position
from tests.support.jobs import environment


@pytest.fixture
def releaser(monkeypatch):
    """A releaser without its thread, and the names of the threads in which handles are dropped."""
    releaser = data_position._Releaser()
    releaser._is_running = True
    monkeypatch.setattr(data_position, "releaser", releaser)
    return releaser


def datasets():
    plain = tf.data.Dataset.range(8).prefetch(tf.data.AUTOTUNE)
    yield plain
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    yield strategy.distribute_datasets_from_function(lambda context: plain)


@pytest.mark.parametrize("number", [0, 1], ids=["plain", "distributed"])
def test_what_nobody_uses_is_destroyed_in_a_thread(releaser, number):
    dataset = data_position.ReleasedDataset(list(datasets())[number])
    iterator = iter(dataset)
    assert int(tf.nest.flatten(next(iterator))[0]) == 0
    (kept,) = releaser.kept
    handles, others = kept.handles, kept.others
    # Init, next and finalize of the one device, and what they call elsewhere.
    assert others[0] is dataset.of and len(others[1]) == 6 * number
    releaser.release_unused()
    assert releaser.kept
    assert [int(tf.nest.flatten(x)[0]) for x in iterator] == list(range(1, 8))
    # A part of a cycle: the collector drops it, here or in any other thread.
    cycle = [iterator]
    cycle.append(cycle)
    del iterator, cycle
    releaser.release_unused()
    gc.collect()
    # The last reference is the releaser's.
    assert len(handles) and releaser.kept
    releaser.release_unused()
    assert releaser.kept == []
    for thread in list(releaser._threads):
        thread.join(60)
    assert handles == []


def test_a_dataset_that_stays_does_not_keep_its_iterators(releaser):
    dataset = data_position.ReleasedDataset(tf.data.Dataset.range(3))
    for _ in range(3):
        assert [int(x) for x in dataset] == [0, 1, 2]
    gc.collect()
    releaser.release_unused()
    assert releaser.kept == []


def test_the_thread_ends_when_nothing_is_left(monkeypatch):
    monkeypatch.setattr(data_position, "_LOOK_SECONDS", 0.01)
    releaser = data_position._Releaser()
    releaser.add([object()], None)
    (thread,) = [t for t in threading.enumerate() if t.name == "iterator release"][-1:]
    thread.join(60)
    assert not thread.is_alive() and not releaser.kept


def test_functions_outlive_the_iterator(releaser):
    # Or a process that ends in between does so with exit code 134.
    ended = []

    class Noted:
        def __init__(self, name):
            self.name = name

        def __del__(self):
            ended.append(self.name)

    releaser.add([Noted("iterator")], [Noted("function")])
    releaser.release_unused()
    for thread in list(releaser._threads):
        thread.join(60)
    assert ended == ["iterator", "function"]


def test_other_iterators_are_left_alone(releaser):
    data_position.release_elsewhere(iter([1, 2]), [1, 2])
    assert releaser.kept == []


def no_thread_can_be_started(monkeypatch):
    """As while the interpreter of Python 3.12 ends."""

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_at_the_end_of_the_process_what_is_in_use_is_left_to_it(releaser, monkeypatch):
    used, unused = (iter(data_position.ReleasedDataset(data)) for data in datasets())
    handles = [weakref.ref(handle) for handle in data_position._handles(used)]
    dropped = [weakref.ref(handle) for handle in data_position._handles(unused)]
    cycle = [unused]
    cycle.append(cycle)
    del unused, cycle
    no_thread_can_be_started(monkeypatch)
    releaser.leave()
    # Python would wait for it, in the thread that ends the process.
    del used
    releaser.kept.clear()
    gc.collect()
    assert all(handle() is not None for handle in handles)
    assert all(handle() is None for handle in dropped)


@pytest.mark.parametrize("is_running", [True, False])
def test_an_iterator_made_at_the_end_of_the_process_is_left_to_python(
    releaser, monkeypatch, is_running
):
    releaser._is_running = is_running
    no_thread_can_be_started(monkeypatch)
    assert [int(x) for x in data_position.ReleasedDataset(tf.data.Dataset.range(3))] == [0, 1, 2]
    assert releaser.kept == []


FILE_IN_A_CYCLE = """
import sys
import keras_psplus as psp

class Log:
    def __init__(self):
        self.me, self.file = self, open(sys.argv[1], "w")

psp.MultiWorkerMirroredStrategy()
log = Log()
log.file.write("written")
"""


@pytest.mark.processes
def test_open_files_are_written_at_the_end(tmp_path):
    (tmp_path / "script.py").write_text(FILE_IN_A_CYCLE)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "log")]
    subprocess.run(command, env=environment(), check=True, timeout=100)
    assert (tmp_path / "log").read_text() == "written"
