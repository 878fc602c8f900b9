"""Rows in two hops: each worker gets the sum of its own, and all get all, in one order."""

import threading
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus import compression
from keras_psplus.all_reduce.collectives.hop import Hop, Route
from keras_psplus.all_reduce.reduction.methods import codings
from keras_psplus.all_reduce.reduction.replica_states import ReplicaStates
from keras_psplus.all_reduce.topology.group_topology import Topology, ranks_by_place


class Meeting:
    """Exchange of tensors between threads, each of which is a worker."""

    def __init__(self, ranks):
        self.ranks = tuple(ranks)
        self._barrier = threading.Barrier(len(self.ranks), timeout=60)
        self._given = {}

    def exchange(self, rank, tensor):
        self._given[rank] = tensor
        self._barrier.wait()
        found = [self._given[one] for one in self.ranks]
        self._barrier.wait()
        return found


class Collectives:
    """A worker's collectives, whose order is that of ranks."""

    def __init__(self, meeting, rank):
        self._meeting, self._rank = meeting, rank

    def all_to_all(self, rows):
        place = self._meeting.ranks.index(self._rank)
        return tf.stack([one[place] for one in self._meeting.exchange(self._rank, rows)])

    def gather(self, row):
        return tf.concat(self._meeting.exchange(self._rank, row), 0)

    def all_reduce(self, tensor):
        return tf.add_n(self._meeting.exchange(self._rank, tensor))


def hop(meeting, rank):
    return Hop(Collectives(meeting, rank), meeting.ranks, meeting.ranks.index(rank))


@pytest.mark.parametrize(
    "groups",
    [((0, 1), (2, 3)), ((0, 3), (1, 2)), ((0, 5), (1, 4), (2, 3)), ((0, 2, 4), (1, 3, 5))],
)
def test_rows_come_to_the_workers_whose_they_are(groups):
    order = ranks_by_place(Topology(groups))
    inside = [Meeting(group) for group in groups]
    between = [Meeting(sorted(peers)) for peers in zip(*groups)]
    # Of each rank the rows that it has for all places.
    rows = np.random.RandomState(1).randn(len(order), len(order), 3).astype("float32")
    total = rows.sum(0)

    def work(rank):
        group = next(one for one in inside if rank in one.ranks)
        route = Route(hop(between[group.ranks.index(rank)], rank), hop(group, rank))
        assert (route.workers, route.group_size) == (len(order), len(group.ranks))
        row = route.scatter(tf.constant(rows[rank]))
        sums = route.sum([tf.constant(rows[rank]), tf.constant(rows[rank, 0])])
        return row.numpy(), route.gather(row).numpy(), [one.numpy() for one in sums]

    with futures.ThreadPoolExecutor(len(order)) as pool:
        found = list(pool.map(work, range(len(order))))
    for rank, (row, everything, (sum_of_rows, sum_of_first)) in enumerate(found):
        np.testing.assert_allclose(row[0], total[order.index(rank)], atol=1e-5)
        np.testing.assert_allclose(everything, total, atol=1e-5)
        np.testing.assert_allclose(sum_of_rows, total, atol=1e-5)
        np.testing.assert_allclose(sum_of_first, total[0], atol=1e-5)


@pytest.mark.extended
def test_what_compressed_sums_leave_out_comes_later(monkeypatch):
    monkeypatch.setenv("KERAS_PSPLUS_NATIVE", "0")
    workers, steps = 3, 50
    compressor = compression.ErrorFeedback(compression.Sign())
    rows = np.random.RandomState(1).randn(workers, workers, 8).astype("float32")
    meeting = Meeting(range(workers))

    def work(rank):
        states, total = ReplicaStates("CPU:0"), 0.0
        for step in range(steps):
            both = codings(compressor, tf.constant(step, tf.int64), states, "rows")
            total = total + hop(meeting, rank).sum_rows(tf.constant(rows[rank]), both)
        return total / steps

    with futures.ThreadPoolExecutor(workers) as pool:
        for found in pool.map(work, range(workers)):
            np.testing.assert_allclose(found, rows.sum(0), atol=0.5)
