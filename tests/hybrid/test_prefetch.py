"""Rows that are read ahead: one update old, at every worker, whatever comes first."""

import functools
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus import HybridStrategy
from keras_psplus.all_reduce.data.lookahead import with_next
from keras_psplus.core.batch.batches import World, split
from keras_psplus.hybrid.rows import subgraph
from keras_psplus.hybrid.server.shard import TableShard
from keras_psplus.tables.rows.row_optimizer import config_of
from tests.hybrid.reference import check_equals_reference, run_beside_reference
from tests.selection import cases
from tests.support.tiers import extended

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]

JOB = pathlib.Path(__file__).with_name("prefetch_job.py")
INT, LONG = tf.int32, tf.int64


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    """Where all have left what the cases come to, and the logs of the workers."""
    folder = tmp_path_factory.mktemp("prefetch")
    return folder, run_beside_reference(JOB, folder, cases(request))


@pytest.mark.parametrize("case", ["stream", "broken_off", *extended("arrays", "unending")])
def test_equals_one_process_that_reads_one_update_late(job, case):
    check_equals_reference(*job, case, 2e-6)


@pytest.mark.cases("stream")
@pytest.mark.parametrize(
    "line",
    [
        "rows of 'second/embeddings' are not read ahead in one of its lookups: its ids depend on",
        "are not read ahead in one of its lookups: it is looked up after an update",
    ],
)
def test_what_is_not_read_ahead_is_said_once(job, line):
    _, logs = job
    assert logs["worker-0"].count(line) == logs["worker-1"].count(line) >= 1


@pytest.mark.extended
@pytest.mark.cases("stream", "unending")
def test_a_share_of_a_worker_s_own_is_read_ahead_as_well(job):
    _, logs = job
    for worker in ("worker-0", "worker-1"):
        lines = [line for line in logs[worker].splitlines() if "its ids depend on" in line]
        assert lines and all("rows of 'second/embeddings' are not" in line for line in lines)


def test_prefetch_is_a_bool():
    with pytest.raises(ValueError, match="`prefetch` must be True or False. Received: prefetch=2"):
        HybridStrategy(prefetch=2)


def test_each_batch_comes_with_the_one_after_it():
    words = tf.ragged.constant([[1], [2, 3], [4], [5, 6, 7], [8]])
    dataset = tf.data.Dataset.from_tensor_slices((words, tf.range(5))).batch(2)
    shards = dataset.map(lambda *batch: split(batch, World(0, 2, 2)))
    found = [
        (
            [pair.data[1].numpy().tolist() for pair in pairs.replicas],
            [pair.following[0].to_list() for pair in pairs.replicas],
            [bool(pair.is_there) for pair in pairs.replicas],
        )
        for pairs in with_next(shards)
    ]
    assert found == [
        ([[0], [1]], [[[4]], [[5, 6, 7]]], [True, True]),
        # Of the last one, a replica has no rows but one that does not count.
        ([[2], [3]], [[[8]], [[8]]], [True, False]),
        # There is none after it.
        ([[4], [4]], [[[8]], [[8]]], [False, False]),
    ]


def test_a_replica_s_next_batch_can_come_later():
    pairs = list(with_next(tf.data.Dataset.range(5), distance=2))
    assert [int(pair.batch) for pair in pairs] == [0, 1, 2, 3, 4]
    assert [int(pair.following) for pair in pairs if pair.is_there] == [2, 3, 4]


def repeated(compute, given, other):
    """What `compute` makes of `other`, by the operations that it has made of `given`."""

    @functools.partial(tf.function, autograph=False)
    def both(given, other):
        return subgraph.repeat(compute(given), {given.ref(): other})

    return both(tf.constant(given), tf.constant(other)).numpy().tolist()


def test_operations_are_repeated_for_other_data():
    known = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([5, 6], LONG)), -1
    )
    inner = tf.function(lambda words: tf.strings.length(words) + 1)

    def compute(words):
        some = tf.cond(tf.size(words) > 1, lambda: tf.constant(1, LONG), lambda: tf.zeros([], LONG))
        with tf.control_dependencies([tf.debugging.Assert(words[0] == "a", [words])]):
            return known.lookup(words) + some

    assert repeated(compute, ["a", "b"], ["b", "c"]) == [7, 0]
    assert repeated(lambda words: words, ["a"], ["b"]) == [b"b"]
    assert repeated(lambda words: tf.constant([3]), ["a"], ["b"]) == [3]
    assert repeated(lambda words: tf.identity(inner(words)), ["a"], ["two"]) == [4]


def test_what_must_not_be_repeated_is_refused():
    variable = tf.Variable([3, 4])
    for compute, why in (
        (lambda ids: tf.gather(variable.read_value(), ids), "depend on variables"),
        (lambda ids: ids + tf.random.uniform([], 0, 5, INT), "not to be run twice .RandomU"),
    ):
        with pytest.raises(subgraph.NotRepeatable, match=why):
            repeated(compute, [0], [1])


def test_rows_can_be_read_as_they_were_before_the_last_update():
    spec = {"key": 0, "name": "t", "rows": 6, "dim": 2, "initializer": None}
    shard = TableShard(spec, 0, 1, None, None, replicas=1, sync=True, keeps_undo_log=True)
    config = config_of(tf.keras.optimizers.SGD(1.0), None, None, None)
    shard.set_optimizer(config, number=1, first_slot=1)
    methods = shard.methods()

    def update(step, ids):
        header = tf.constant([0, step, 0, 1, 0, step], LONG)
        methods["push1"](header, tf.constant([1.0]), tf.constant(ids, INT), tf.ones([len(ids), 2]))

    def rows(step, ids=(5, 0, 3, 1, 4)):
        return methods["lookup_at"](tf.constant(step, LONG), tf.constant(ids))[:, 0].numpy()

    np.testing.assert_array_equal(rows(0), [0, 0, 0, 0, 0])
    update(0, [4, 1, 3])
    np.testing.assert_array_equal(rows(0), [0, 0, 0, 0, 0])
    np.testing.assert_array_equal(rows(1), [0, 0, -1, -1, -1])
    update(1, [3, 0])
    np.testing.assert_array_equal(rows(1), [0, 0, -1, -1, -1])
    np.testing.assert_array_equal(rows(2), [0, -1, -2, -1, -1])
    update(2, [])
    np.testing.assert_array_equal(rows(2), rows(3))
