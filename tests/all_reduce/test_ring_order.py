"""Orders of hosts in which the neighbours of a ring are near each other."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_psplus.all_reduce.topology import auto_topology
from keras_psplus.planning import Link, Links

COUNT = 4e6


def in_racks(racks):
    """Links of hosts, fast inside a rack, and the racks as groups."""
    hosts = [f"worker-{i}" for i in range(len(racks))]
    links = {
        (i, j): Link(0.2, 1e9 if racks[i] == racks[j] else 1e8)
        for i, j in itertools.combinations(range(len(racks)), 2)
    }
    groups = [[i for i, r in enumerate(racks) if r == rack] for rack in sorted(set(racks))]
    return Links(hosts, links), groups


def test_hosts_of_one_rack_stand_together():
    links, groups = in_racks("abab")
    found = auto_topology.better_ring(links, range(4), groups, COUNT)
    assert found.hosts == ("worker-0", "worker-2", "worker-1", "worker-3")
    # Each rack's link carries what one of its hosts sends, and not what both do.
    assert found.after_ms == pytest.approx(found.before_ms / 2)
    assert found.after_ms == pytest.approx(6 * (0.2 + 8e3 * 1e6 / 1e8))


@pytest.mark.parametrize("racks", ["aabb", "aaaa", "ab", "abc"])
def test_an_order_that_is_as_good_is_left(racks):
    links, groups = in_racks(racks)
    assert auto_topology.better_ring(links, range(len(racks)), groups, COUNT) is None


def test_ranks_are_given_in_the_order_of_the_ring():
    links, groups = in_racks("aaaaaabbbbbb")
    # As text, 10 and 11 come before 2: hosts in two racks, one after the other, are no such ring.
    ring = sorted(range(12), key=str)
    found = auto_topology.better_ring(links, ring, groups, COUNT)
    along = [found.hosts[rank] for rank in ring]
    racks = ["aaaaaabbbbbb"[int(host.removeprefix("worker-"))] for host in along]
    assert len([*itertools.groupby(racks)]) == 2
    assert auto_topology.better_ring(links, range(12), groups, COUNT) is None


@given(st.data())
def test_what_is_found_is_better(data):
    number = data.draw(st.integers(2, 9))
    hosts = [f"h{i}" for i in range(number)]
    pairs = list(itertools.combinations(range(number), 2))
    rates = data.draw(
        st.lists(st.sampled_from([1e7, 1e8, 1e9]), min_size=len(pairs), max_size=len(pairs))
    )
    links = Links(hosts, {pair: Link(0.1, rate) for pair, rate in zip(pairs, rates)})
    ring = [0, *data.draw(st.permutations(range(1, number)))]
    groups = [[host] for host in range(number)]
    found = auto_topology.better_ring(links, ring, groups, COUNT)
    if found is None:
        return
    assert sorted(found.hosts) == hosts and found.hosts[0] == "h0"
    places = [hosts.index(found.hosts[rank]) for rank in ring]
    assert auto_topology.ring_ms(links, places, groups, COUNT) == pytest.approx(found.after_ms)
    assert found.after_ms <= 0.85 * auto_topology.ring_ms(links, ring, groups, COUNT)
