"""Tables that are captured while they are trained, and read from all rows and changes."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.files import tables as shard_files
from keras_psplus.tables import files
from keras_psplus.tables.snapshot import living
from tests.support.tiers import extended
from tests.tables.test_changes import Follower
from tests.tables.test_store import Servers, batches, small_chunks

tables = psp.tables
__all__ = ["small_chunks"]
KEY, SLOTS = 5, 1
POLICIES = {
    "full": (tables.Count(2), tables.Capacity(10) | tables.Unused(steps=3)),
    "filtered": (tables.Bloom(2, bits=8 * 840 * 8), tables.Norm(0.4)),
}
HALVES = {"rows_dtype": "bfloat16", "slots_dtype": "bfloat16"}


def state(servers):
    """All that files have to keep: by key, and of each server the Bloom filter."""
    rows, candidates, filters = {}, {}, []
    for store in servers.stores:
        entries = store.entries(0, 10_000).numpy()
        own = np.flatnonzero(living(entries))
        columns = [
            c.sparse_read(own.astype(np.int32)).numpy() for c in (store.weights, *store.slots)
        ]
        rows |= {
            key: (frequency, last, *row.tolist())
            for (key, frequency, last, _), row in zip(
                entries[own].tolist(), np.concatenate(columns, 1)
            )
        }
        counted, _ = store.counters()
        candidates |= {key: (count, last) for key, count, last, _ in counted.tolist()}
        if store.admission.filter is not None:
            filters.append(store.admission.filter.numpy().sum())
    return rows, candidates, sum(filters), int(servers.stores[0].clock.steps)


def capture(store, since):
    candidates = store.admission.candidates
    every = [store.key_rows, *([] if candidates is None else [candidates])]
    return files.Capture(store, KEY, since, store.freeze, [rows.frozen.read for rows in every])


class Chain:
    """Files of the servers of a table, which is trained while they are written."""

    def __init__(self, servers, folder):
        self.servers, self._folder = servers, folder
        self._batches, self._marks = itertools.cycle(batches()), [None] * len(servers.stores)
        self.paths = [[] for _ in servers.stores]
        self.changes, self.trained = [], []

    def train(self):
        self.trained.append(next(self._batches))
        self.servers.step(*self.trained[-1])

    def write(self):
        """Writes once more, and returns what is to be read."""
        stores = self.servers.stores
        captures = [capture(store, mark) for store, mark in zip(stores, self._marks)]
        expected, self.trained = state(self.servers), []

        def parts(of):
            for part in of.parts():
                self.train()
                yield part

        for i, of in enumerate(captures):
            self.paths[i].append(str(self._folder / f"{len(self.paths[i])}-{i}"))
            shard_files.write(self.paths[i][-1], {}, {}, more=parts(of))
            of.close()
            self._marks[i] = of.mark
        self.changes.append(sum(of.changes for of in captures))
        self.are_whole = [of.is_whole for of in captures]
        return expected


@pytest.mark.parametrize("case", extended("full", "filtered"))
def test_all_rows_and_changes_are_those_of_the_moments_of_their_capture(
    case, tmp_path, monkeypatch
):
    monkeypatch.setattr(files, "_ROWS", 3)
    types = HALVES if case == "filtered" else {}
    chain = Chain(Servers(*POLICIES[case], count=2, **types), tmp_path)
    follower = Follower(chain.servers)
    # As many servers, or one.
    after, whole = Servers(*POLICIES[case], count=2, **types), []
    for _ in range(3):
        for _ in range(2):
            chain.train()
        follower.look()
        expected = chain.write()
        whole.append(all(chain.are_whole))
        for i, store in enumerate(after.stores):
            files.load(store, chain.paths, KEY, SLOTS, i, len(after.stores))
        assert state(after) == expected
    assert len(expected[0]) > 5
    assert whole[0] and not all(whole)
    if case == "filtered":
        # Few are removed. Of two readers, neither makes the other begin again.
        assert whole == [True, False, False] and follower.wholes == 1
    if case == "full":
        return  # Which of the rows of one age goes first depends on where they lie.
    # It goes on as the one that was not read.
    for keys, gradient in chain.trained:
        after.step(keys, gradient)
    assert len(chain.trained) > 2 and state(after) == state(chain.servers)


@pytest.mark.extended
def test_what_was_kept_for_the_last_capture_is_not_written_in_the_next():
    servers = Servers()
    servers.step(*next(batches()))
    store = servers.stores[0]
    frozen, none = store.key_rows.frozen, tf.constant([-1, -1, 0], tf.int64)
    store.freeze(none)
    frozen.keep(tf.constant([0]))
    assert frozen._kept.size() == 1
    # As by an update that went on while that was closed.
    store.freeze(none)
    assert not list(frozen.take_kept())
    frozen.keep(tf.constant([0, 1]))
    assert [len(entries) for entries, _ in frozen.take_kept()] == [2]


@pytest.mark.extended
def test_rows_that_were_set_are_written_whole(tmp_path):
    chain = Chain(Servers(), tmp_path)
    for _ in range(2):
        chain.train()
        chain.write()
    assert chain.are_whole == [False]
    store = chain.servers.stores[0]
    key = min(state(chain.servers)[0])
    store.write(0, tf.constant([key]), tf.ones([1, store.dim]))
    expected = chain.write()
    assert chain.are_whole == [True]
    after = Servers()
    files.load(after.stores[0], chain.paths, KEY, SLOTS)
    assert state(after) == expected
    # Files before the last whole one are not read.
    files.load(after.stores[0], [chain.paths[0][2:]], KEY, SLOTS)
    assert state(after) == expected


def test_changes_that_do_not_fit_are_refused_by_name(tmp_path):
    chain = Chain(Servers(), tmp_path)
    for _ in range(3):
        chain.train()
        chain.write()
    (paths,) = chain.paths
    store = Servers().stores[0]
    with pytest.raises(OSError, match=f"changes in {paths[2]} do not follow {paths[0]}"):
        files.load(store, [[paths[0], paths[2]]], KEY, SLOTS)
    with pytest.raises(OSError, match=f"{paths[1]} has changes, and the file of the rows before"):
        files.load(store, [paths[1:]], KEY, SLOTS)
