"""Copies of hot rows on workers: as old as they may be, each gradient once, fewer bytes."""

import functools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.hybrid.rows import row_owners
from keras_psplus.hybrid.rows.row_codec import RowCodec
from keras_psplus.hybrid.tables import row_cache
from keras_psplus.hybrid.tables.hot_rows import HotRows
from keras_psplus.hybrid.tables.placement import TablePlacer
from keras_psplus.tables.rows.row_optimizer import config_of
from tests.hybrid.dynamic_cases import ALONE
from tests.hybrid.models import classifier, embedding, flat, initializer, is_alone, of_classes
from tests.hybrid.traffic import Traffic, rows_of
from tests.support.cluster import reference, run
from tests.support.layouts import STALENESS
from tests.support.results import assert_close
from tests.support.tiers import extended

ROWS, DIM, IDS, BATCH, STEPS, EPOCHS = 300, 4, 6, 32, 20, 2
optimizers, tables = keras.optimizers, psp.tables


def data():
    """Ids after Zipf's law, and labels; the last batch is not full."""
    random = np.random.default_rng(0)
    weights = 1 / np.arange(1, ROWS + 1)
    size = BATCH * STEPS - 5, IDS
    ids = random.permutation(ROWS)[random.choice(ROWS, size, p=weights / weights.sum())]
    return ids, random.integers(0, 3, len(ids))


def by_key(name, **options):
    return psp.layers.DynamicEmbedding(DIM, initializer=initializer(7), name=name, **options)


def exact(has_keys=True):
    """Two lookups of a table, and perhaps one of another one, of keys."""
    options = {"admit": tables.Count(2), "expire": tables.Unused(steps=6) | tables.Norm(0.02)}
    ids = keras.Input((IDS,), dtype="int64")
    # The strategy has caches of tables of these names.
    numbers = embedding(ROWS, DIM, name="cached_by_number")
    parts = [numbers(ids[:, :4]), numbers(ids[:, 2:])]
    keys = by_key("cached_by_key", **options) if has_keys else None
    parts += [keys(ids)] if has_keys else []
    return keras.Model(ids, classifier(flat(*parts))), of_classes(), keys


def stale():
    """A model whose gradients do not depend on what is read."""
    ids = keras.Input((IDS,), dtype="int64")
    number = embedding(ROWS, DIM, name="stale_by_number")
    key = by_key("by_key", cache=tables.Cache(150, staleness=STALENESS))
    model = keras.Model(ids, keras.layers.Concatenate()([number(ids), key(ids)]))
    factors = np.linspace(-1, 1, 2 * DIM, dtype="float32")

    def loss(y, rows):
        return tf.reduce_mean(rows * factors * (1 + tf.reshape(tf.cast(y, tf.float32), [-1, 1, 1])))

    return model, loss, key


CASES = {
    "exact": (exact, lambda: optimizers.SGD(0.5)),
    "exact_numbers": (functools.partial(exact, has_keys=False), lambda: optimizers.SGD(0.5)),
    "stale": (stale, lambda: optimizers.SGD(0.5)),
}


def trained(name):
    """Trains a case; each worker leaves bytes of rows in `fit`, and what its steps have read."""
    make, optimizer = CASES[name]
    (x, y), reads = data(), [np.zeros([0, 4], np.int64)]
    model, loss, table = make()
    model.compile(optimizer(), loss)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)

    def note(hot, now, ids, is_read):
        one = np.full(len(ids), 1)
        reads.append(np.stack([id(hot) * one, now * one, ids, is_read], 1))

    with mock.patch.object(HotRows, "on_read", note):
        traffic = None if is_alone() else Traffic()
        results = dict(model.fit(dataset, epochs=EPOCHS, verbose=0).history)
        results |= traffic.since() if traffic else {}
        if name.startswith("stale"):
            # Rows of a step may be older; but not those that `predict` reads.
            del results["loss"]
            results["predicted"] = model.predict(x[:21], batch_size=8, verbose=0)
        # Outside of `fit`, nothing waits and no copy is read, by whichever optimizer.
        if name == "stale":
            model.train_on_batch(x[:BATCH], y[:BATCH])
    keys = table.keys if table is not None else []
    return model, results | {"keys": keys, "own reads": np.concatenate(reads)}


def trained_beside_one_process(case):
    """Checks that a case equals one process, and returns what each worker has left."""
    expected, found = reference(trained, ALONE, name=case), run("hybrid22", trained, name=case)
    del expected["own reads"]
    assert_close({name: found.first[name] for name in expected}, expected, 1e-4)
    return found


def sent(of, direction):
    names = [name for name in of if name.startswith(f"own {direction} of ")]
    return sum(of[name][2] for name in names)


def without_cache(worker, lookups):
    """Bytes of rows in one direction, if a worker reads all rows of its part of each batch."""
    rows = sum(rows_of(worker, data()[0][:, columns], BATCH) for columns in lookups)
    return EPOCHS * rows * 4 * (DIM + 1)


@pytest.mark.processes
@pytest.mark.parametrize("case", ["exact_numbers", *extended("exact")])
def test_exact_copies_equal_one_process_and_take_fewer_bytes(case):
    lookups = [slice(4), slice(2, None), slice(None)][: 3 if case == "exact" else 2]
    for worker, of in trained_beside_one_process(case).items():
        assert sent(of, "pull") < 0.93 * without_cache(worker, lookups)


@pytest.mark.processes
@pytest.mark.extended
def test_no_copy_is_older_than_it_may_be_and_takes_half_of_the_bytes():
    for worker, of in trained_beside_one_process("stale").items():
        for direction in ("pull", "gradient"):
            assert sent(of, direction) < 0.5 * without_cache(worker, [slice(None)] * 2)
        reads = of["own reads"]
        found = ages(((table, row), now, is_read) for table, now, row, is_read in reads)
        assert len(found) > len(reads) / 3 and max(found) == STALENESS


def ages(reads):
    """For each use of a copy, how many updates ago the row was read; of one process's reads."""
    read_at, found = {}, []
    for key, now, is_read in reads:
        if is_read:
            read_at[key] = now
        else:
            found.append(now - read_at[key])
    return found


def test_the_hottest_ids_have_copies():
    random, hot = np.random.default_rng(0), HotRows(100, 1 << 40)
    hot.is_active = True
    weights = 1 / np.arange(1, 5001)
    order = random.permutation(5000)
    for now in range(400):
        ids = np.unique(order[random.choice(5000, 300, p=weights / weights.sum())])
        places, is_read, _ = hot.begin(ids, np.int64(now))
        assert len(np.unique(places[places >= 0])) == np.count_nonzero(places >= 0)
        hot.put(ids, np.int64(now), np.bool_(False))
    known = hot._ids
    assert len(known) == len(np.unique(known)) == 100 and len(np.unique(hot._places)) == 100
    assert np.isin(order[:60], known).mean() > 0.9
    # Others become hot.
    for now in range(400, 800):
        ids = np.unique(order[::-1][random.choice(5000, 300, p=weights / weights.sum())])
        hot.begin(ids, np.int64(now))
    assert np.isin(order[::-1][:60], hot._ids).mean() > 0.9


def test_a_row_with_a_gradient_keeps_its_place():
    hot = HotRows(1, 3)
    hot.is_active = True

    def step(ids, now, holds=True):
        places, is_read, _ = hot.begin(np.array(ids), np.int64(now))
        _, due, due_ids = hot.put(np.array(ids), np.int64(now), np.bool_(holds))
        return places.tolist(), is_read.tolist(), due_ids.tolist()

    assert step([7], 0) == ([-1], [True], [])
    assert step([7], 1) == ([0], [True], [])
    for now in (2, 3, 4):
        assert step([8], now) == ([-1], [True], [7] if now == 4 else [])
    assert step([7, 8], 5) == ([0, -1], [True, True], [])
    assert [found.tolist() for found in hot.flush()] == [[0], [7]]
    assert step([8, 8 + 2**40], 6) == ([0, -1], [True, True], [])
    hot.is_active = False
    assert step([8], 7) == ([-1], [True], [8])


def test_owners_are_those_who_alone_have_changed_a_row():
    owners, codec = row_owners.RowOwners(2), RowCodec(None, 3)
    rows = tf.reshape(tf.range(300, dtype=tf.float32), [100, 3])
    lookup = owners.lookup(
        tf.int64, lambda ids: ids != 99, lambda ids: tf.gather(rows, ids), lambda rows: rows
    )

    def asked(replica, copied, others=()):
        answer = lookup(
            tf.constant([replica, len(copied)], tf.int64), tf.constant([*copied, *others], tf.int64)
        )
        good, words = row_owners.split_bits(answer, tf.constant(len(copied)), codec)
        changed = [c for c, is_good in zip(copied, good.numpy()) if not is_good]
        np.testing.assert_array_equal(words, tf.gather(rows, [*changed, *others]))
        return changed

    every = list(range(100))
    assert asked(0, every, [3]) == every
    # Replica 0 changes all, replica 1 those that are even.
    ids = tf.constant(every, tf.int64)
    positions = tf.constant([*every, *every[::2]])
    parts = tf.constant([0, 1], tf.int64), tf.constant([100, 50])
    owners.note(ids, positions, parts, tf.ones([100], tf.bool))
    found = asked(0, every, [5, 4])
    assert set(every[::2]) | {99} <= set(found)
    # Some lie on one cell.
    assert len(found) < 60 and asked(1, every) == every
    owners.note(ids, positions, parts, tf.zeros([100], tf.bool))
    assert asked(0, every) == every


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (keras.optimizers.SGD(0.1), True),
        (keras.optimizers.SGD(0.1, momentum=0.9), False),
        (keras.optimizers.SGD(0.1, weight_decay=0.1), False),
        (keras.optimizers.SGD(0.1, clipvalue=0.1), False),
        (keras.optimizers.Adagrad(0.1), False),
    ],
)
def test_gradients_wait_where_sums_do_the_same(optimizer, expected):
    assert row_cache.is_linear(config_of(optimizer, optimizer.weight_decay, None, None)) is expected


def test_a_cache_of_a_table_on_the_workers_is_refused():
    caches = {"*mine*": psp.tables.Cache(7)}
    placer = TablePlacer("auto", 1 << 20, 2, lambda dim: dim, lambda dim: dim, caches)
    assert placer.cache_of("mine/embeddings") == {"rows": 7, "staleness": 0}
    assert placer.cache_of("others/embeddings") is None
    placer.decide("others/embeddings", 10, 4)
    with pytest.raises(ValueError, match="`cache` is for tables on parameter servers.*Received: a"):
        placer.decide("mine/embeddings", 10, 4)
