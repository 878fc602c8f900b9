"""Backups of dynamic tables by servers: all rows now and then, and the changes in between."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.errors import TableServerError
from keras_psplus.files import tables
from keras_psplus.files.tables import read_list, stems_of, write_list
from keras_psplus.hybrid import saving
from keras_psplus.hybrid.server.server_files import ServerFiles
from keras_psplus.hybrid.server.shard import DynamicShard
from keras_psplus.tables import policies, snapshot
from keras_psplus.tables.chunks import FrozenRows
from keras_psplus.tables.row_optimizer import config_of
from keras_psplus.tables.store import RowStore
from tests.tables.test_files import SLOTS, state
from tests.tables.test_store import DIM, INITIALIZER, Servers

KEY = 0


class Job:
    """Servers with one table, without a network, and what the chief asks of them.

    Args:
        count: Number of servers.
        admit, expire: The table's policies.
    """

    name, key, rows, dim, slots_in_use = "t", KEY, 0, DIM, SLOTS

    def __init__(self, count=2, admit=None, expire=None):
        self.optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
        spec = {"name": "t", "key": KEY, "dim": DIM, "initializer": INITIALIZER}
        spec |= {"default": "zeros", "admit": policies.check_admit(admit)}
        spec["expire"] = policies.check_expire(expire)
        self.shards = [DynamicShard(spec, i, count, None, None, 1, True) for i in range(count)]
        for shard in self.shards:
            shard.set_optimizer(config_of(self.optimizer, None, None, None), 1, 1)
        self.stores = [shard.store for shard in self.shards]
        self._pushes = 0
        self.start()

    owners = Servers.owners

    def step(self, keys, gradient):
        """An update, which a thread that writes may go on beside."""
        owners, header = self.owners(keys), [0, self._pushes, 0, 1, 0, self._pushes]
        self._pushes += 1
        for i, shard in enumerate(self.shards):
            own = tf.constant(keys[owners == i]), tf.constant(gradient[owners == i])
            push = shard.methods()["push1"]
            push(tf.constant(header, tf.int64), tf.constant([1.0]), *own).numpy()

    def start(self):
        """Starts the servers' processes, as far as their files go."""
        self._files = [
            ServerFiles({KEY: shard}, {"server": i, "servers": len(self.shards)})
            for i, shard in enumerate(self.shards)
        ]
        self._chain = []

    def __len__(self):
        return len(self.shards)

    def ask_all(self, what, **arguments):
        answers = []
        for files in self._files:
            try:
                answers.append(getattr(files, what)(**arguments))
            except OSError as error:
                raise TableServerError(f"{error}") from error
        return answers

    def save(self, folder, between=lambda: None):
        """As the chief does; returns the beginning of the files' names."""
        content = saving.begin(self, [self], folder, self._chain)
        between()
        listed = read_list(folder)
        kept = [] if listed is None else stems_of(listed)
        self.ask_all("keep", directory=folder, stems=[*kept, content["stem"]])
        content = saving.finish(self, folder, content, kept)
        write_list(folder, content)
        self._chain = content["chain"]
        return content["stem"]

    def load(self, folder):
        saving.load(self, [self], folder)


def batch(step, rows=30):
    """Keys, of which some come for a few steps only, and their gradients."""
    keys = 7 * np.arange(rows, dtype=np.int64) + 11 * (step // 3)
    return keys, np.full([rows, DIM], 0.25 * (step + 1), np.float32)


def bytes_of(folder, stem):
    return sum(path.stat().st_size for path in folder.glob(f"{stem}-*"))


@pytest.mark.extended
def test_a_backup_that_was_prepared_traces_nothing_and_loses_nothing(tmp_path, monkeypatch):
    traced = []
    for owner, name in ((RowStore, "freeze"), (FrozenRows, "read")):
        function = getattr(owner, name)

        def noted(of, *args, name=name, function=function):
            traced.append(name)
            return function(of, *args)

        monkeypatch.setattr(owner, name, noted)
    job = Job(1, psp.tables.Count(2), psp.tables.Unused(steps=4))
    (files,) = job._files
    files.prepare()
    assert not traced
    files.saves_in_training = True
    files.prepare()
    # Of rows, and of keys that are counted.
    assert traced == ["freeze", "read", "read"] and files.progress
    files.prepare()
    for step in range(6):
        job.step(*batch(step))
        job.save(str(tmp_path))
    assert len(traced) == 3 and len(stems_of(read_list(str(tmp_path)))) == 6
    reader = Job(1, psp.tables.Count(2), psp.tables.Unused(steps=4))
    reader.load(str(tmp_path))
    assert state(reader) == state(job)


@pytest.mark.extended
def test_changes_are_as_large_as_what_was_touched_until_all_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_LEAST_CHANGED", 0)
    job, folder = Job(), str(tmp_path)
    keys, gradient = np.arange(6000, dtype=np.int64), np.ones([6000, DIM], np.float32)
    sizes, counts = [], []
    for step in range(11):
        touched = slice(None) if step < 2 else slice(0, 900)
        job.step(keys[touched], gradient[touched])
        if step:
            stem = job.save(folder)
            sizes.append(bytes_of(tmp_path, stem))
            counts.append(len(stems_of(read_list(folder))))
    # 900 of 6000 rows each time; those that come to more than half of them are not kept apart.
    assert counts[:6] == [1, 2, 3, 4, 5, 1]
    assert max(sizes[1:5]) < 0.25 * sizes[0]
    stems = {path.name.split("-")[1] for path in tmp_path.glob("tables-*")}
    assert stems == {stem.split("-")[1] for stem in stems_of(read_list(folder))}
    other = Job(1)
    other.load(folder)
    assert state(other)[0] == state(job)[0]


class Killed(BaseException):
    """The process has ended: nothing runs any more."""


class Killer:
    """Ends everything at a point, the beginning or the end of an operation on files."""

    def __init__(self, patch):
        self.left, self.is_dead = None, False
        for owner, name in (
            (tf.raw_ops, "SaveV2"),
            (tf.raw_ops, "MergeV2Checkpoints"),
            (tf.io.gfile, "rename"),
            (tf.io.gfile, "remove"),
            (tf.io.gfile, "makedirs"),
            (tables, "remove_tree"),
            (os, "fsync"),
            (os, "replace"),
        ):
            patch.setattr(owner, name, self._around(getattr(owner, name)))

    def _around(self, function):
        def counted(*args, **kwargs):
            self.point()
            result = function(*args, **kwargs)
            self.point()
            return result

        return counted

    def point(self):
        if self.left is not None:
            self.left -= 1
            self.is_dead = self.is_dead or self.left <= 0
        if self.is_dead:
            raise Killed


def test_a_kill_at_any_point_loses_nothing(tmp_path, monkeypatch):
    how = psp.tables.Count(2), psp.tables.Unused(steps=4)
    job, reader, killer = Job(2, *how), Job(1, *how), Killer(monkeypatch)
    folder, expected, seen, step = str(tmp_path), {}, set(), 0
    # Not in a row, as a save has more points than that.
    for point in range(40, 201, 40):
        job.start()
        killer.left, killer.is_dead = None, False
        try:
            for number in range(4):
                job.step(*batch(step))
                step += 1
                if number == 1:
                    killer.left = point
                at = state(job)
                # A list that is there was written by a whole save.
                expected["next"] = at
                stem = job.save(folder, lambda at=step: job.step(*batch(at + 100)))
                expected[stem] = at
        except Killed:
            seen.add(number)
            job.ask_all("settle")
        killer.left, killer.is_dead = None, False
        listed = read_list(folder)
        assert listed is not None
        reader.load(folder)
        # The list's renaming is when the new one counts.
        assert state(reader) == expected.get(listed["stem"], expected["next"])
        expected[listed["stem"]] = state(reader)
        job.load(folder)
        step += 1
    assert seen == {1, 2, 3}


@pytest.mark.extended
def test_a_damaged_file_of_changes_is_named(tmp_path):
    job, folder = Job(), str(tmp_path)
    for step in range(6):
        job.step(*batch(step))
        stem = job.save(folder)
    assert len(stems_of(read_list(folder))) == 6
    paths = tmp_path.glob(f"{stem}-1-of-2.data-*")
    path = max(paths, key=lambda path: path.stat().st_size)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(TableServerError, match=f"cannot read .*Received: .*{stem}-1-of-2"):
        job.load(folder)
    for path in tmp_path.glob(f"{stem}-1-of-2*"):
        path.unlink()
    with pytest.raises(TableServerError, match=f"cannot read .*Received: .*{stem}-1-of-2"):
        job.load(folder)
