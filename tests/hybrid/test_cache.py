"""Copies of hot rows on workers: as old as they may be, each gradient once, fewer bytes."""

import os
import pathlib
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.compression import Int8
from keras_psplus.hybrid.rows import row_owners
from keras_psplus.hybrid.rows.row_codec import RowCodec
from keras_psplus.hybrid.tables import row_cache
from keras_psplus.hybrid.tables.hot_rows import HotRows
from keras_psplus.hybrid.tables.placement import TablePlacer
from keras_psplus.tables.rows.row_optimizer import config_of
from tests.hybrid.cache_job import BATCH, CASES, DIM, EPOCHS, STALENESS, data
from tests.hybrid.reference import run_beside_reference
from tests.hybrid.test_faults import cluster
from tests.parameter_server.waiting import wait_for
from tests.selection import cases
from tests.support.results import load
from tests.support.tiers import extended

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]

JOB = pathlib.Path(__file__).with_name("cache_job.py")
WORKERS = "worker-0", "worker-1"


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    """Where all have left what the cases come to, and the logs of the cluster."""
    folder, wanted = tmp_path_factory.mktemp("cache"), cases(request)
    names = [name for name in CASES if name in wanted]
    return folder, run_beside_reference(JOB, folder, names)


@pytest.mark.parametrize("case", ["exact", "stale", *extended("exact_clipped", "stale_with_slots")])
def test_equals_one_process(job, case):
    folder, logs = job
    expected = np.load(folder / f"{case}-reference.npz")
    for worker in WORKERS:
        found = load(folder / f"{case}-{worker}.npz", logs[worker])
        for name in (name for name in expected if not name.startswith("bytes")):
            # Rows of a step may be older; but not those that `predict` reads.
            if not (case.startswith("stale") and name == "loss"):
                np.testing.assert_allclose(
                    found[name], expected[name], rtol=1e-4, atol=2e-5, err_msg=name
                )


def without_cache(worker, lookups):
    """Bytes of rows in one direction, if a worker reads all rows of its part of each batch."""
    x = data()[0]
    parts = [np.array_split(x[i : i + BATCH], 2) for i in range(0, len(x), BATCH)]
    shares = [part[WORKERS.index(worker)] for part in parts]
    rows = sum(len(np.unique(s[:, columns])) for s in shares for columns in lookups)
    return EPOCHS * rows * 4 * (DIM + 1)


@pytest.mark.cases("exact", "stale")
@pytest.mark.parametrize("worker", WORKERS)
def test_fewer_bytes_are_sent(job, worker):
    folder, logs = job
    exact, stale = (load(folder / f"{c}-{worker}.npz", logs[worker]) for c in ("exact", "stale"))
    whole = slice(None)
    lookups = [slice(4), slice(2, None), whole]
    assert exact["bytes pull"] < 0.93 * without_cache(worker, lookups)
    assert stale["bytes pull"] < 0.5 * without_cache(worker, [whole, whole])
    assert stale["bytes gradient"] < 0.5 * without_cache(worker, [whole, whole])


def ages(reads):
    """For each use of a copy, how many updates ago the row was read; of one process's reads."""
    read_at, found = {}, []
    for key, now, is_read in reads:
        if is_read:
            read_at[key] = now
        else:
            found.append(now - read_at[key])
    return found


@pytest.mark.cases("stale")
@pytest.mark.parametrize("worker", WORKERS)
def test_no_copy_is_older_than_it_may_be(job, worker):
    folder, logs = job
    reads = load(folder / f"stale-{worker}.npz", logs[worker])["reads"]
    found = ages(((table, row), now, is_read) for table, now, row, is_read in reads)
    assert len(found) > len(reads) / 3 and max(found) == STALENESS


@pytest.mark.extended
def test_copies_of_a_job_that_was_killed_are_not_too_old(tmp_path):
    args = (60, tmp_path, "backup=epoch", "cache=16:12")
    for number, (victim, batch) in enumerate((("ps-1", 25), ("worker-1", 45))):
        with cluster(tmp_path / f"{number}", *args, "pause=0.1") as job:
            wait_for(job.log_path("worker-0"), f"batch {batch}.", seconds=120)
            os.kill(job.pids[victim], signal.SIGKILL)
            result = job.wait(90)
        assert not result.timed_out and result.exit_code != 0, result.tails(40)
    with cluster(tmp_path / "last", *args) as job:
        result = job.wait(120)
    # Gradients that waited at an epoch's end are in the backup; each counts once.
    assert "end iterations=60 off=0.0e+00" in result.logs["worker-0"], result.tails(40)
    logs = list(tmp_path.glob("reads-worker-*"))
    assert len(logs) == 6
    used = 0
    for path in logs:
        lines = [line.split() for line in path.read_text().splitlines() if line.count(" ") == 2]
        found = ages((row, int(now), is_read == "1") for now, row, is_read in lines)
        used += len(found)
        assert max(found, default=0) <= 12
    assert used > 50


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


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: psp.tables.Cache(0), "`rows` must be an int from 1 up. Received: rows=0"),
        (lambda: psp.tables.Cache(2.5), "`rows` must be an int from 1 up. Received: rows=2.5"),
        (lambda: psp.tables.Cache(2, -1), "`staleness` must be an int from 0 up. Received: stale"),
        (lambda: psp.layers.DynamicEmbedding(2, cache=5), "`cache` must be a `tables.Cache`, or"),
        (lambda: psp.HybridStrategy(cache=5), "`cache` must be a `tables.Cache`, a dict from pat"),
        (lambda: psp.HybridStrategy(cache={"*": 5}), "`cache` must be a `tables.Cache`, a dict"),
        (
            lambda: psp.HybridStrategy(cache=psp.tables.Cache(2), prefetch=True),
            "`prefetch=True` reads rows that are one update old",
        ),
        (
            lambda: psp.HybridStrategy(cache=psp.tables.Cache(2), sync=False),
            "keeps copies that equal the rows.*Received: .* with sync=False",
        ),
        (
            lambda: psp.HybridStrategy(cache={"a": psp.tables.Cache(2)}, row_compression=Int8()),
            "keeps copies that equal the rows.*Received: .* with row_compression or",
        ),
    ],
)
def test_a_wrong_argument_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_a_cache_of_a_table_on_the_workers_is_refused():
    caches = {"*mine*": psp.tables.Cache(7)}
    placer = TablePlacer("auto", 1 << 20, 2, lambda dim: dim, lambda dim: dim, caches)
    assert placer.cache_of("mine/embeddings") == {"rows": 7, "staleness": 0}
    assert placer.cache_of("others/embeddings") is None
    placer.decide("others/embeddings", 10, 4)
    with pytest.raises(ValueError, match="`cache` is for tables on parameter servers.*Received: a"):
        placer.decide("mine/embeddings", 10, 4)


def test_in_one_process_a_cache_changes_nothing():
    def trained(**options):
        keras.utils.set_random_seed(1)
        layer = psp.layers.DynamicEmbedding(2, initializer="ones", **options)
        layer = psp.layers.DynamicEmbedding.from_config(layer.get_config())
        model = keras.Sequential([keras.Input((2,), dtype="int64"), layer])
        model.compile("sgd", "mse")
        model.fit(np.array([[5, 7]]), np.zeros((1, 2, 2)), verbose=0)
        return layer.get_weights()[0]

    np.testing.assert_array_equal(trained(cache=psp.tables.Cache(4, staleness=9)), trained())
