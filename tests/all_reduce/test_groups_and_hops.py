"""Topologies and hops that there are and are not, and how links make groups."""

import itertools
import types

import numpy as np
import tensorflow as tf

from keras_psplus import compression
from keras_psplus.all_reduce.collectives import hop
from keras_psplus.all_reduce.topology import auto_topology, group_topology
from keras_psplus.all_reduce.topology.group_topology import Topology, compressors_per_hop
from keras_psplus.cluster import TaskConfig
from tests.support.tables import for_each

NAMES = ["worker-0", "worker-1", "worker-2", "worker-3"]
PAIRS = Topology(((0, 1), (2, 3)))


def test_one_value_is_for_the_hop_between_groups():
    within, between = compressors_per_hop("int8", PAIRS)
    assert within is None and isinstance(between.inner, compression.Int8)
    within, between = compressors_per_hop({"within": "bf16", "between": {"*kernel": "sign"}}, PAIRS)
    assert isinstance(within, compression.Cast)
    assert isinstance(between, compression.ByVariable)
    assert compressors_per_hop({"within": None}, PAIRS) == (None, None)


def test_one_ring_has_the_compressor_of_the_hop_that_there_is():
    both = compressors_per_hop({"within": "bf16", "between": "int8"}, "auto")
    assert both.collapse_to_ring("flat") == (None, both.between)
    assert both.collapse_to_ring(Topology(((0,), (1,)))) == (None, both.between)
    assert both.collapse_to_ring(Topology(((0, 1),))) == (None, both.within)


def test_groups_are_in_rank_order_and_of_all_replicas_of_a_worker():
    found = group_topology.get([["worker-3", 1], ("worker-2", "worker-0")], NAMES)
    assert found == Topology(((0, 2), (1, 3)))
    assert found.of_replicas(2) == Topology(((0, 1, 4, 5), (2, 3, 6, 7)))
    assert found.has_levels and found.describe(NAMES) == "worker-0 worker-2 | worker-1 worker-3"
    for flat in (Topology(((0, 1),)), Topology(((0,), (1,)))):
        assert not flat.has_levels
    # The devices of a host are a group by themselves.
    assert Topology(((0,), (1,))).of_replicas(2).has_levels
    # A script for a cluster can be tried without one.
    assert group_topology.get([["worker-0"], ["worker-1"]], None) == "auto"
    assert group_topology.get(None, NAMES) == group_topology.get("flat", NAMES) == "flat"


@for_each("number", [2, 3, 4, 7, 8])
def test_each_pair_is_measured_once_and_nobody_twice_at_a_time(number):
    rounds = auto_topology.rounds_of_pairs(number)
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(number), 2))
    for pairs in rounds:
        members = list(itertools.chain(*pairs))
        assert len(members) == len(set(members))


def measured(racks, far=10.0, noise=1.3):
    """Links of workers by the racks that they are in; those inside differ by up to `noise`."""
    workers = range(len(racks))
    return {
        (a, b): auto_topology.MeasuredLink(
            1e-4, far if racks[a] != racks[b] else noise ** ((a + b) % 2)
        )
        for a, b in itertools.combinations(workers, 2)
    }


@for_each(
    "racks, groups",
    [
        ("aabb", ((0, 1), (2, 3))),
        ("abab", ((0, 2), (1, 3))),
        ("aaab", ((0, 1, 2), (3,))),
        ("aabbcc", ((0, 1), (2, 3), (4, 5))),
        ("aaaa", ((0,), (1,), (2,), (3,))),
        ("ab", ((0,), (1,))),
    ],
)
def test_links_make_groups(racks, groups):
    found = auto_topology.groups_of(measured(racks), len(racks))
    assert found == Topology(groups)


def test_links_that_make_no_groups_are_one_ring():
    # A chain: the second is near to the first and the third, which are far apart.
    chain = {(0, 1): 1.0, (1, 2): 1.0, (0, 2): 10.0}
    chain = {pair: auto_topology.MeasuredLink(1e-4, seconds) for pair, seconds in chain.items()}
    assert not auto_topology.groups_of(chain, 3).has_levels
    assert not auto_topology.groups_of(measured("aabb", far=1.7, noise=1.0), 4).has_levels


def test_table_of_links():
    table = auto_topology.links_table(
        {(0, 1): auto_topology.MeasuredLink(1e-3, 1e-3 + 32 * 65536 / 1e8)}, NAMES[:2]
    )
    assert table.split("\n")[1].split() == ["worker-0", "1.0", "ms", "100", "Mbit/s"]


@for_each(
    "shape, number, shard",
    [
        ((16, 40), 2, (8, 40)),
        ((17, 40), 2, (9, 40)),
        # Of few rows, filling up would add too much.
        ((3, 40), 2, (60,)),
        ((3, 3, 4, 5), 2, (18, 5)),
        ((7,), 4, (2,)),
        ((), 2, (1,)),
    ],
)
def test_shards_make_the_whole(shape, number, shard):
    tensor = tf.reshape(tf.range(np.prod(shape), dtype=tf.float32), shape)
    other = tf.ones([5])
    cuts = [hop.Cut.of(one, number) for one in (tensor, other)]
    assert cuts[0].shard == shard
    rows = hop.rows_of([tensor, other], cuts)
    assert rows.shape[0] == number
    for found, expected in zip(hop.wholes_of(rows, cuts), (tensor, other), strict=True):
        np.testing.assert_array_equal(found, expected)
    row = rows[:1]
    parts = hop.shards_of(row, cuts)
    assert [tuple(part.shape) for part in parts] == [cut.shard for cut in cuts]
    np.testing.assert_array_equal(hop.row_of(parts), row)


class Exchange:
    """What a launcher does for replicas that all have the same."""

    all_to_all = staticmethod(tf.identity)

    def __init__(self, size):
        self._size = size

    def gather(self, row):
        return tf.repeat(row, self._size, 0)


@for_each("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64"])
def test_rows_of_any_type_are_summed_and_gathered(dtype):
    rows = tf.cast(tf.reshape(tf.range(15), [3, 5]), dtype)
    summed = hop.Hop(Exchange(3), range(3), 0).scatter(rows)
    assert summed.dtype == dtype and summed.shape == (1, 5)
    np.testing.assert_array_equal(tf.cast(summed, tf.float64), [[15.0, 18.0, 21.0, 24.0, 27.0]])
    gathered = hop.Hop(Exchange(3), range(3), 0).gather(rows[:1])
    assert gathered.dtype == dtype
    np.testing.assert_array_equal(tf.cast(gathered, tf.float64), [[0.0, 1.0, 2.0, 3.0, 4.0]] * 3)


def control():
    """That of four workers."""
    task = TaskConfig({"worker": tuple(f"h{i}:1" for i in range(4))}, "worker", 0)
    return types.SimpleNamespace(task=task, names=NAMES)


def test_groups_of_several_sizes_are_one_ring(monkeypatch):
    monkeypatch.setattr(auto_topology, "measure", lambda extended: measured("aaab"))
    extended = types.SimpleNamespace(control=control(), worker_devices=["CPU:0"])
    found = auto_topology.decide(extended)
    groups = "worker-0 worker-1 worker-2 | worker-3"
    assert found.topology == "flat"
    assert f"\none ring: groups {groups} are not of one size (" in found.report


def test_a_better_order_of_workers_is_named():
    def line(racks):
        pairs = measured(racks)
        groups = auto_topology.groups_of(pairs, 4)
        return auto_topology._better_order(pairs, groups, control())

    assert "in TF_CONFIG or --hosts: worker-0 worker-2 worker-1 worker-3 (" in line("abab")
    assert line("aabb") == line("aaaa") == ""
