"""Contiguous parts of layers, by costs, by patterns, and by what is known of some."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keras_psplus.pipeline import plan


def largest(costs, parts):
    return max(sum(c for c, p in zip(costs, parts) if p == part) for part in set(parts))


def all_partitions(count, stages):
    for cuts in itertools.combinations(range(1, count), stages - 1):
        edges = (0, *cuts, count)
        yield [s for s, (a, b) in enumerate(zip(edges, edges[1:])) for _ in range(a, b)]


# On a busy machine, drawing may be slow.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_no_other_partition_is_better(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    found = plan.balance(costs, stages)
    assert found == sorted(found)
    assert set(found) == set(range(stages))
    best = min(largest(costs, parts) for parts in all_partitions(len(costs), stages))
    assert largest(costs, found) == best


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match=r"of 2 layer\(s\).*Received: 3 stages"):
        plan.balance([1.0, 1.0], 3)


def test_patterns():
    names = ["embedding", "block_0_dense", "block_1_dense", "head"]
    assert plan.by_patterns(names, [["emb*", "block_0*"], ["block_1*", "head"]]) == [
        *(0, 0),
        *(1, 1),
    ]


@pytest.mark.parametrize(
    "patterns, message",
    [
        ([["embedding"], ["nothing*"]], "'dense' fits no pattern"),
        ([["*"], ["dense"]], r"'dense' fits the patterns of stages \[0, 1\]"),
        ([["*"], ["nothing*"]], r"No layer has a name like 'nothing\*'"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(patterns, message):
    with pytest.raises(ValueError, match=f"{message}.*embedding, dense.*Received: stages="):
        plan.by_patterns(["embedding", "dense"], patterns)


def test_a_layer_without_a_stage_is_on_that_of_the_layer_before():
    assert plan.with_neighbours([None, 1, None, 0, None]) == [1, 1, 1, 0, 0]
    assert plan.with_neighbours([None]) == [0]


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=8), st.data()
)
def test_memory_is_even_where_that_costs_little(layers, data):
    costs, sizes = [cost for cost, _ in layers], [1e9 * size for _, size in layers]
    stages = data.draw(st.integers(1, len(costs)))
    found = plan.balance(costs, stages, lambda _, first, end: sum(sizes[first:end]))
    fastest = plan.balance(costs, stages)
    assert found == sorted(found)
    assert set(found) == set(range(stages))
    assert largest(costs, found) <= 1.1 * largest(costs, fastest) + 1e-9
    assert largest(sizes, found) <= largest(sizes, fastest)
    even = max(1.5 * sum(sizes) / stages, 64e6)
    if largest(sizes, fastest) <= even:
        assert found == fastest
    else:
        # Even, or no cut that is as fast has less in its largest part.
        others = (
            largest(sizes, parts)
            for parts in all_partitions(len(costs), stages)
            if largest(costs, parts) <= 1.1 * largest(costs, fastest)
        )
        assert largest(sizes, found) <= max(even, min(others))


def test_a_stage_keeps_less_where_it_may_be_a_little_slower():
    costs, sizes = [50, 5, 45, 5], [1e9, 1e9, 1e6, 1e6]
    assert plan.balance(costs, 2) == [0, 1, 1, 1]
    sizes = [1e6, 1e9, 1e9, 1e9]
    memory = lambda _, first, end: sum(sizes[first:end])  # noqa: E731
    assert plan.balance(costs, 2, memory) == [0, 0, 1, 1]
    # Of megabytes, nobody cares.
    assert plan.balance(costs, 2, lambda *part: memory(*part) / 1e3) == [0, 1, 1, 1]


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=8), st.data()
)
def test_fewer_bytes_are_sent_where_that_costs_little(layers, data):
    costs, sent = zip(*layers)
    stages = data.draw(st.integers(1, len(costs)))
    found = plan.balance(costs, stages, sent=sent.__getitem__)

    def most_sent(parts):
        cuts = (i for i in range(1, len(parts)) if parts[i] != parts[i - 1])
        return max((sent[i] for i in cuts), default=0)

    others = list(all_partitions(len(costs), stages))
    best = min(largest(costs, parts) for parts in others)
    allowed = [parts for parts in others if largest(costs, parts) <= 1.05 * best + 1e-6]
    assert largest(costs, found) <= 1.05 * best + 1e-6
    assert most_sent(found) == min(map(most_sent, allowed))
