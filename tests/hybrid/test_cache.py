"""Copies of hot rows on workers: as old as they may be, each gradient once, fewer bytes."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.hybrid.tables import row_cache
from keras_psplus.hybrid.tables.placement import TablePlacer
from keras_psplus.hybrid.tables.row_cache import HotRows
from keras_psplus.tables.row_optimizer import config_of
from tests.hybrid.dynamic_cases import ALONE
from tests.hybrid.models import embedding, initializer, is_alone
from tests.hybrid.traffic import Traffic, rows_of
from tests.support.cluster import reference, run
from tests.support.layouts import STALENESS
from tests.support.results import assert_close
from tests.support.tiers import extended

ROWS, DIM, IDS, BATCH, STEPS, EPOCHS = 300, 4, 6, 32, 20, 2
# Columns of ids of two lookups: of one table, or of two, one of which is of keys.
LOOKUPS = {
    "one_table": (slice(4), slice(2, None)),
    **dict.fromkeys(("keys", "keys in 16 bits"), (slice(None), slice(None))),
}
# In 16 bits, a sum that has waited is rounded once.
TOLERANCE = {"keys in 16 bits": 0.02}
tables = psp.tables


def data():
    """Ids after Zipf's law, and labels; the last batch is not full."""
    random = np.random.default_rng(0)
    weights = 1 / np.arange(1, ROWS + 1)
    size = BATCH * STEPS - 5, IDS
    ids = random.permutation(ROWS)[random.choice(ROWS, size, p=weights / weights.sum())]
    return ids, random.integers(0, 3, len(ids))


def make(case):
    """A model whose gradients do not depend on what is read."""
    ids = keras.Input((IDS,), dtype="int64")
    number = embedding(ROWS, DIM, name="stale_by_number")
    other = number
    if case != "one_table":
        options = {"initializer": initializer(7), "cache": tables.Cache(150, staleness=STALENESS)}
        options["rows_dtype"] = "bfloat16" if "16" in case else "float32"
        other = psp.layers.DynamicEmbedding(DIM, name="by_key", **options)
    rows = [lookup(ids[:, own]) for lookup, own in zip((number, other), LOOKUPS[case])]
    factors = np.linspace(-1, 1, 2 * DIM, dtype="float32")

    def loss(y, rows):
        return tf.reduce_mean(rows * factors * (1 + tf.reshape(tf.cast(y, tf.float32), [-1, 1, 1])))

    return keras.Model(ids, keras.layers.Concatenate()(rows)), loss, other


def trained(name):
    """Trains it; each worker leaves bytes of rows in `fit`, and what its steps have read."""
    (x, y), reads = data(), [np.zeros([0, 4], np.int64)]
    model, loss, table = make(name)
    model.compile(keras.optimizers.SGD(0.5), loss)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)

    def note(hot, now, ids, is_read):
        one = np.full(len(ids), 1)
        reads.append(np.stack([id(hot) * one, now * one, ids, is_read], 1))

    with mock.patch.object(HotRows, "on_read", note):
        traffic = None if is_alone() else Traffic()
        # Rows of a step may be older, and so its loss; but not those that `predict` reads.
        model.fit(dataset, epochs=EPOCHS, verbose=0)
        results = traffic.since() if traffic else {}
        if name != "one_table":
            results["predicted"] = model.predict(x[:21], batch_size=8, verbose=0)
            # Outside of `fit`, nothing waits and no copy is read, by whichever optimizer.
            model.train_on_batch(x[:BATCH], y[:BATCH])
            results["keys"] = table.keys
    return model, results | {"own reads": np.concatenate(reads)}


def sent(of, direction):
    names = [name for name in of if name.startswith(f"own {direction} of ")]
    return sum(of[name][2] for name in names)


def without_cache(worker, lookups):
    """Bytes of rows in one direction, if a worker reads all rows of its part of each batch."""
    rows = sum(rows_of(worker, data()[0][:, columns], BATCH) for columns in lookups)
    return EPOCHS * rows * 4 * (DIM + 1)


@pytest.mark.processes
@pytest.mark.parametrize("case", ["one_table", *extended("keys", "keys in 16 bits")])
def test_no_copy_is_older_than_it_may_be_and_takes_half_of_the_bytes(case):
    expected, found = reference(trained, ALONE, name=case), run("hybrid22", trained, name=case)
    del expected["own reads"]
    tolerance = TOLERANCE.get(case, 1e-4)
    assert_close({name: found.first[name] for name in expected}, expected, tolerance)
    for worker, of in found.items():
        for direction in ("pull", "gradient"):
            assert sent(of, direction) < 0.5 * without_cache(worker, LOOKUPS[case])
        reads = of["own reads"]
        found_ages = ages(((table, row), now, is_read) for table, now, row, is_read in reads)
        assert len(found_ages) > len(reads) / 3 and max(found_ages) == STALENESS


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
    caches = {"*mine*": tables.Cache(7, staleness=2)}
    placer = TablePlacer("auto", 1 << 20, 2, lambda dim: dim, lambda dim: dim, caches)
    assert placer.cache_of("mine/embeddings") == {"rows": 7, "staleness": 2}
    assert placer.cache_of("others/embeddings") is None
    placer.decide("others/embeddings", 10, 4)
    with pytest.raises(ValueError, match="`cache` is for tables on parameter servers.*Received: a"):
        placer.decide("mine/embeddings", 10, 4)
