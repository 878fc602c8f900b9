"""Expiry on streams of keys, against a plain model of the docstrings' contract."""

import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.tables.keys import blocks_of, mixed
from tests.support.tiers import extended
from tests.tables.test_store import DIM, Servers

tables = psp.tables


class Model:
    """A table that is a dict from keys to frequencies and last uses."""

    def __init__(self, servers, rows=None, policy="lru", idle=None, count=None):
        self.shares = [None if rows is None else -(-(rows - i) // servers) for i in range(servers)]
        self.policy, self.idle, self.count = policy, idle, count
        self.found, self.candidates, self.now = {}, {}, 0

    def step(self, keys):
        before, self.now = self.now, self.now + 1
        if self.idle is not None:
            for of in (self.found, self.candidates):
                for key in [k for k, (_, last) in of.items() if before - last >= self.idle]:
                    del of[key]
        for key in keys:
            frequency = 0
            if key not in self.found and self.count is not None:
                seen = self.candidates.pop(key, (0, 0))[0] + 1
                if seen < self.count:
                    self.candidates[key] = seen, self.now
                    continue
                frequency = seen - 1
            self.found[key] = self.found.get(key, (frequency, 0))[0] + 1, self.now
        for server, share in enumerate(self.shares):
            own = [key for key in self.found if owner(key, len(self.shares)) == server]
            over = 0 if share is None else max(0, len(own) - share)
            for key in sorted(own, key=self._order)[:over]:
                del self.found[key]

    def _order(self, key):
        frequency, last = self.found[key]
        by = (frequency, last) if self.policy == "lfu" else (last,)
        return last == self.now, *by, hashed(key)

    def living(self):
        idle = np.inf if self.idle is None else self.idle
        return {key: of for key, of in self.found.items() if self.now - of[1] < idle}


@functools.cache
def hashed(key):
    return np.int64(mixed(tf.constant(key, tf.int64)).numpy())


@functools.cache
def owner(key, servers):
    return int(blocks_of(mixed(tf.constant([key], tf.int64)))[0]) % servers


def trained(servers, keys):
    keys = np.array(keys, np.int64)
    servers.step(keys, np.ones([len(keys), DIM], np.float32))


EXPIRES = {
    "lru": ({"rows": 10}, tables.Capacity(10)),
    "lfu": ({"rows": 10, "policy": "lfu"}, tables.Capacity(10, "lfu")),
    "unused": ({"idle": 3}, tables.Unused(steps=3)),
    "both": (
        {"rows": 8, "policy": "lfu", "idle": 2},
        tables.Capacity(8, "lfu") | tables.Unused(steps=2),
    ),
}


@pytest.mark.parametrize(
    ("expire", "count", "servers"),
    [
        ("unused", 2, 1),
        *extended(("lru", None, 1), ("both", None, 2), ("lfu", 2, 2), ("both", 2, 1)),
    ],
)
def test_a_stream_keeps_what_the_model_keeps(expire, count, servers):
    known, policy = EXPIRES[expire]
    table = Servers(None if count is None else tables.Count(count), policy, servers)
    model, random = Model(servers, count=count, **known), np.random.default_rng(count)
    for step in range(40):
        # Streams that bring new ids, that stand still, and that have few or more than there is
        # room for.
        first = (7 * step if step % 20 < 10 else 0) + random.integers(9)
        keys = np.unique(first + random.integers(0, 30, random.integers(1, 14)))
        trained(table, keys)
        model.step(keys.tolist())
        assert table.contents() == model.living(), step


@pytest.mark.parametrize(
    ("expire", "admit"), extended(("lru", None), ("unused", None), ("unused", tables.Count(2)))
)
def test_rows_that_expired_are_used_again(expire, admit):
    table = Servers(admit, EXPIRES[expire][1])
    for step in range(40):
        trained(table, range(5 * step, 5 * step + 10))
    store = table.stores[0]
    assert int(store.key_rows.next.numpy()) <= 45
    if admit is not None:
        assert int(store.admission.candidates.next.numpy()) <= 45


@pytest.mark.extended
def test_a_table_that_resumes_keeps_the_same():
    """Rows come in another order, as files have them."""
    whole, model = Servers(expire=EXPIRES["lru"][1]), Model(1, rows=10)
    steps = [[(7 * step + i * i) % 61 for i in range(6)] for step in range(12)]
    for keys in steps[:8]:
        trained(whole, sorted(set(keys)))
        model.step(sorted(set(keys)))
    again, old = Servers(expire=EXPIRES["lru"][1]), whole.stores[0]
    entries = old.entries(0, 1000)
    entries = tf.gather(entries, tf.where(entries[:, 1] >= 0)[::-1, 0])
    has_key = np.isin(entries[:, 0].numpy(), list(whole.contents()))
    again.stores[0].key_rows.add_entries(entries[has_key])
    again.stores[0].clock.steps.assign(old.clock.steps)
    for keys in steps[8:]:
        trained(again, sorted(set(keys)))
        model.step(sorted(set(keys)))
        assert again.contents() == model.living()
