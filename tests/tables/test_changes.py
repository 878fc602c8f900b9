"""Followers of a table's changes have its rows, on one server and on two."""

import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.tables import admission, snapshot
from tests.tables.test_store import DIM, Servers, batches, small_chunks

tables = psp.tables
__all__ = ["small_chunks"]


class Follower:
    """A dict with a table's rows, from their changes alone."""

    def __init__(self, servers):
        self.rows, self._mark, self.wholes = {}, None, 0
        self._functions = [
            (
                lambda since, s=s: s.removed(tf.constant(since)).numpy(),
                lambda since, first, s=s: s.changed(tf.constant(since), first, 3).numpy(),
            )
            for s in servers.stores
        ]

    def look(self):
        found = snapshot.read(self._functions, self._mark, DIM)
        if found.is_whole:
            self.rows, self.wholes = {}, self.wholes + 1
        for key in found.gone.tolist():
            self.rows.pop(key, None)
        assert (np.diff(found.keys) > 0).all()
        self.rows |= dict(zip(found.keys.tolist(), found.rows))
        self._mark = found.mark
        return found


def check(follower, servers):
    assert set(follower.rows) == set(servers.contents())
    keys = np.array(sorted(follower.rows), np.int64)
    rows = [follower.rows[key] for key in keys.tolist()]
    np.testing.assert_array_equal(np.reshape(rows, [-1, DIM]), servers.lookup(keys))


def test_changes_add_up_to_the_table(monkeypatch):
    # Rows die before a sweep comes by.
    monkeypatch.setattr(admission, "_SWEPT", 1)
    servers = Servers(expire=tables.Capacity(9) | tables.Unused(steps=2), count=2)
    often, seldom = Follower(servers), Follower(servers)
    gone = sent = 0
    for step, (keys, gradient) in enumerate(batches()):
        servers.step(keys, gradient)
        found = often.look()
        check(often, servers)
        sent += len(found.keys)
        gone += len(found.gone)
        if step % 4 == 3:
            # What the other follower no longer needs is gone for this one, which reads the whole.
            seldom.look()
            check(seldom, servers)
    assert often.wholes == 1 and gone > 5 and sent < 12 * len(list(batches()))


@pytest.mark.extended
def test_rows_that_are_set_are_read_whole():
    servers = Servers()
    follower = Follower(servers)
    for keys, gradient in batches():
        servers.step(keys, gradient)
    follower.look()
    assert not len(follower.look().keys)
    key = min(follower.rows)
    servers.stores[0].write(0, tf.constant([key]), tf.ones([1, DIM]))
    assert follower.look().is_whole
    check(follower, servers)
    servers.stores[0].clear()
    follower.look()
    assert not follower.rows
