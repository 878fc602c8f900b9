"""The bytes of a step, and its floor."""

import dataclasses

import pytest

from keras_psplus import planning
from keras_psplus.planning import Table, Traits, Variable, Work, traits_of

DENSE = Work([Variable((1000, 1000), factor_rows=10), Variable((1000,))])
SPARSE = Work([Variable((10, 10))], [Table(100_000, 10, {1: 1000, 2: 1500, 4: 2250})])


def test_floor_is_what_takes_longest():
    assert planning.floor_ms(30.0, 1.25e6, 100e6) == 100.0
    assert planning.floor_ms(30.0, 1.25e6, 1e9) == 30.0
    assert planning.floor_ms(30.0, 1.25e6, None) == 30.0
    # Messages that wait for one another end the step, while bytes are under way.
    assert planning.floor_ms(30.0, 1.25e6, 100e6, 6, 0.5) == 100.0
    assert planning.floor_ms(30.0, 1.25e6, 1e9, 6, 0.5) == 33.0


@pytest.mark.parametrize(
    ("traits", "expected"),
    [
        (Traits("alone"), 0),
        (Traits(), 6),
        (Traits(compression="topk:0.01"), 3),
        (Traits(compression="powersgd:4"), 12),
        (Traits(shard="all"), 9),
        (Traits(updates="local", every=10), 0.6),
        (Traits("parameter_server", waits=False), 4),
        (Traits("hybrid"), 8),
        # Of a layer, a gathering and a sum; a table is looked up.
        (Traits("tensor_parallel"), 6),
    ],
)
def test_messages_that_wait_for_one_another(traits, expected):
    assert planning.rounds(traits, SPARSE, 4) == expected


def test_factors_go_where_they_are_fewer_bytes():
    moved = planning.flows(Traits(compression="factors"), DENSE, 2)
    assert moved.between == 4 * (10 * 2000 + 1000)
    # From 2 x 1,000 x 1,000 / (2,000 x 10) workers on, the gradient itself is no more.
    assert planning.goes_as_factors(DENSE.variables[0], "factors", 100)
    assert not planning.goes_as_factors(DENSE.variables[0], "factors", 101)
    unknown = Work([Variable((1000, 1000)), Variable((1000,))])
    assert planning.flows(Traits(compression="factors"), unknown, 2) == planning.flows(
        Traits(), unknown, 2
    )


def test_rows_between_and_beyond_those_that_were_counted():
    table = SPARSE.tables[0]
    assert [table.rows_of(n) for n in (1, 2, 4)] == [1000, 1500, 2250]
    assert table.rows_of(8) == pytest.approx(3375)
    assert table.rows_of(0.5) == pytest.approx(1000 / 1.5)
    assert 1500 < table.rows_of(3) < 2250
    assert table.rows_of(1 << 40) == 100_000
    assert Table(50, 1, {1: 30}).rows_of(1) == 30
    assert Table(50, 1, {1: 30}).rows_of(4) == 50
    assert Table(50, 1, {1: 0, 2: 0}).rows_of(1) == 0


def test_tables_lie_on_servers_from_a_megabyte_on():
    hybrid = planning.flows(Traits("hybrid"), SPARSE, 2)
    assert hybrid == (400, 1000 * (8 + 8 + 40), 1000 * 40)
    small = Work(SPARSE.variables, [Table(1000, 10, {1: 100})])
    assert planning.flows(Traits("hybrid"), small, 2) == planning.flows(Traits(), small, 2)


def test_local_steps_under_servers_send_whole_tables():
    moved = planning.flows(Traits("parameter_server", updates="local", every=8), SPARSE, 2)
    assert moved.up == moved.down == 4 * (100 + 1_000_000) / 8


def test_more_workers_share_the_servers():
    async_ = Traits("parameter_server", waits=False)
    moved = planning.flows(async_, DENSE, 4)
    assert planning.busiest(async_, DENSE, 4, 2) == 2 * moved.up == 2 * moved.down
    assert planning.busiest(async_, DENSE, 4, 8) == moved.up


def test_memory_of_a_worker():
    def megabytes(traits, slots=2.0):
        return planning.memory(traits, dataclasses.replace(SPARSE, slots=slots), 4) / 4

    rows = 1000 * 10
    assert megabytes(Traits()) == 100 * 4 + 1_000_000 * 3 + rows
    assert megabytes(Traits("hybrid")) == 100 * 4 + rows
    assert megabytes(Traits("parameter_server", waits=False)) == 100 * 2 + 2 * rows
    assert megabytes(Traits(compression="int8")) == megabytes(Traits()) + 100
    # Weights and two slots, in shares or whole, and one gradient of the table's size.
    one = 1_000_000 + rows
    assert megabytes(Traits(shard="optimizer")) == 100 * 1.75 + 1_000_000 * 1.5 + one
    assert megabytes(Traits(shard="all")) == 100 * 1 + 1_000_000 * 0.75 + one


def test_tensor_parallelism_sends_activations_and_keeps_parts():
    together, odd = Traits("tensor_parallel"), Variable((10, 3), factor_rows=8)
    dense = Variable((1000, 20), factor_rows=8)
    # Of 32 rows on all workers, an output is gathered and an input's gradient is summed.
    moved = planning.flows(together, Work([dense, odd]), 4)
    assert moved.between == 0.75 * 4 * 32 * (20 + 2 * 1000) and not moved.up + moved.down
    # A convolution's kernel is gathered.
    conv = Work([Variable((3, 3, 4, 8))])
    assert planning.flows(together, conv, 4).between == 0.75 * 4 * 288
    work = Work([dense, odd], slots=2.0)
    assert planning.memory(together, work, 4) == 4 * 4 * (20_000 / 4 + 30)
    tables = dataclasses.replace(SPARSE, variables=[])
    rows = SPARSE.tables[0].rows_of(1) * SPARSE.tables[0].dim
    assert planning.flows(together, tables, 4).between == 6 * 4 * rows


def test_bytes_of_shares():
    def sent(shard, work):
        return planning.flows(Traits(shard=shard), work, 4).between

    dense = Work([Variable((1000, 10))])
    assert sent("optimizer", dense) == sent(None, dense) == 1.5 * 40_000
    assert sent("all", dense) == 1.5 * sent(None, dense)
    # A table is gathered whole, and once, though rows are all that is looked up.
    table = 0.75 * 4 * 1_000_000
    with_slots = dataclasses.replace(SPARSE, slots=1.0)
    assert sent("optimizer", with_slots) == sent(None, SPARSE) + table
    assert sent("optimizer", SPARSE) == sent(None, SPARSE)
    assert sent("all", SPARSE) == sent(None, SPARSE) + 0.75 * 4 * 100 + table


@pytest.mark.parametrize(
    ("strategy", "arguments", "loses"),
    [
        ("MultiWorkerMirrored", {}, "exact"),
        ("MultiWorkerMirrored", {"compression": "factors"}, "exact"),
        ("MultiWorkerMirrored", {"compression": "factors:bf16"}, "lossy"),
        ("MultiWorkerMirrored", {"updates": "accumulate:4"}, "batch x4"),
        (
            "MultiWorkerMirrored",
            {"compression": "int8", "updates": "diloco:2"},
            "local steps, lossy",
        ),
        ("ParameterServer", {"mode": "sync"}, "exact"),
        ("ParameterServer", {"pull_compression": "bf16"}, "stale, lossy"),
        ("Hybrid", {}, "exact"),
        ("Hybrid", {"prefetch": True}, "stale"),
    ],
)
def test_what_an_entry_loses(strategy, arguments, loses):
    assert traits_of(f"{strategy}Strategy", arguments).loses == loses
