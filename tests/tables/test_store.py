"""Rows of keys on one server or several, against a model of them in Python."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.tables import chunks, policies
from keras_psplus.tables import keys as initial_rows
from keras_psplus.tables.keys import blocks_of, mix_number, mixed, streams
from keras_psplus.tables.row_optimizer import config_of
from keras_psplus.tables.snapshot import living
from keras_psplus.tables.store import RowStore
from tests.support.tiers import extended

DIM, STEPS = 2, 12
tables = psp.tables
INITIALIZER = initial_rows.check_initializer(keras.initializers.RandomUniform(-1, 1, seed=3))


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """Chunks of a few rows, so that tables have several, of which the first begins smaller."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_FIRST_BYTES", 128)
        patch.setattr(chunks, "_LEAST_ROWS", 4)
        patch.setattr(chunks, "MOST_ROWS", 64)
        yield


class Servers:
    """Stores of one table, shared out as parameter servers have them."""

    def __init__(self, admit=None, expire=None, count=1, optimizer=None, **types):
        spec = {"name": "t", "dim": DIM, "initializer": INITIALIZER, "default": "zeros", **types}
        spec["admit"], spec["expire"] = policies.check_admit(admit), policies.check_expire(expire)
        self.stores = [RowStore(spec, i, count) for i in range(count)]
        optimizer = optimizer or keras.optimizers.SGD(1.0, momentum=0.5)
        for store in self.stores:
            store.set_optimizer(config_of(optimizer, None, None, None))
        self._applies = [self._apply_to(store) for store in self.stores]

    @staticmethod
    def _apply_to(store):
        def apply(keys, gradient):
            zero = tf.constant(0, tf.int64)
            with tf.control_dependencies([store.apply(keys, gradient, 1.0, tf.zeros([0]), zero)]):
                return tf.identity(zero)

        signature = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DIM], tf.float32)
        return tf.function(apply, input_signature=signature, autograph=False)

    def owners(self, keys):
        return (blocks_of(mixed(tf.constant(keys, tf.int64))) % len(self.stores)).numpy()

    def step(self, keys, gradient):
        owners = self.owners(keys)
        for i, apply in enumerate(self._applies):
            apply(tf.constant(keys[owners == i]), tf.constant(gradient[owners == i]))

    def lookup(self, keys, trains=False):
        rows, owners = np.zeros([len(keys), DIM], np.float32), self.owners(keys)
        for i, store in enumerate(self.stores):
            rows[owners == i] = store.lookup(tf.constant(keys[owners == i]), trains)
        return rows

    def contents(self):
        """Frequency and last use by key."""
        found = {}
        for store in self.stores:
            entries = store.entries(0, 1000).numpy()
            found |= {key: (n, last) for key, n, last, _ in entries[living(entries)].tolist()}
        return found


def initial(keys):
    return initial_rows.maker({"initializer": INITIALIZER, "dim": DIM})(
        tf.constant(keys, tf.int64)
    ).numpy()


def batches():
    random = np.random.default_rng(0)
    pool = random.integers(-(2**62), 2**62, 40)
    for step in range(STEPS):
        keys = pool[np.unique((2 * step + random.integers(0, 14, 12)) % 40)]
        yield keys, random.normal(size=(len(keys), DIM)).astype("float32")


@pytest.mark.parametrize("count", extended(1, 2))
def test_counts_and_unused_rows_are_those_of_a_model(count):
    servers, (n, idle) = Servers(tables.Count(2), tables.Unused(steps=3), count), (2, 3)
    rows, slots, counts, candidates = {}, {}, {}, {}
    for step, (keys, gradient) in enumerate(batches()):
        for of in (counts, candidates):
            for key in [k for k, (_, last) in of.items() if step - last >= idle]:
                del of[key]
        expected = [rows[k] if k in counts else np.zeros(DIM) for k in keys.tolist()]
        np.testing.assert_allclose(servers.lookup(keys, True), expected, atol=1e-5)
        for key, g in zip(keys.tolist(), gradient):
            if key not in counts:
                seen = candidates.pop(key, (0, 0))[0] + 1
                if seen < n:
                    candidates[key] = seen, step + 1
                    continue
                rows[key], slots[key] = initial([key])[0], np.zeros(DIM)
                counts[key] = seen - 1, 0
            slots[key] = 0.5 * slots[key] - g
            rows[key] = rows[key] + slots[key]
            counts[key] = counts[key][0] + 1, step + 1
        servers.step(keys, gradient)
    living_now = {key: of for key, of in counts.items() if STEPS - of[1] < idle}
    assert 5 < len(living_now) < 40 and servers.contents() == living_now
    some = np.array(sorted(living_now))
    np.testing.assert_allclose(servers.lookup(some), [rows[k] for k in some.tolist()], atol=1e-5)


@pytest.mark.parametrize(
    "admit",
    [tables.Bloom(2, bits=8 * 840 * 8), *extended(tables.Probability(0.4))],
    ids=["bloom", "draw"],
)
def test_admission_is_the_same_on_any_number_of_servers(admit):
    every = [Servers(admit, tables.Norm(0.4), count) for count in (1, 2)]
    for keys, gradient in batches():
        for servers in every:
            servers.step(keys, gradient)
    one, two = every
    assert one.contents() == two.contents()
    assert 0 < len(one.contents()) < 40
    keys = np.array(sorted(one.contents()))
    np.testing.assert_array_equal(one.lookup(keys), two.lookup(keys))
    assert np.linalg.norm(one.lookup(keys), axis=1).min() >= 0.4


def test_capacity_keeps_the_most_frequent():
    servers = Servers(expire=tables.Capacity(4, "lfu"))
    for keys in ([1, 2, 3], [1, 2], [4], [5], [1, 6], [7]):
        keys = np.array(keys, np.int64)
        servers.step(keys, np.zeros([len(keys), DIM], np.float32))
    assert set(servers.contents()) == {1, 2, 6, 7}
    # Of rows that are free again, others are made.
    assert int(servers.stores[0].key_rows.next) <= 6


def test_keys_of_one_pattern_are_spread():
    hashes = mixed(tf.range(0, 1 << 44, 1 << 32, dtype=tf.int64))
    counts = np.bincount(blocks_of(hashes).numpy() % 4)
    assert counts.min() > 0.8 * counts.max()


def test_streams_are_the_same_in_graphs_and_outside():
    keys = [5, -3, 2**61]
    steps = [0x9E3779B97F4A7C15 * i for i in (1, 2, 3)]
    starts = [mix_number(mix_number(key % 2**64) + mix_number(7)) for key in keys]
    expected = [[mix_number((start + step) % 2**64) for step in steps] for start in starts]
    for make in streams, tf.function(streams):
        found = make(tf.constant(keys, tf.int64), 7, 3)
        assert found.numpy().tolist() == expected
