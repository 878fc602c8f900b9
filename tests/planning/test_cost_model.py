"""The parts of a predicted step."""

import dataclasses

import pytest

from keras_psplus.planning import cost_model, link_bytes
from keras_psplus.planning.cost_model import Cluster
from keras_psplus.planning.link_bytes import Table, Variable, Work
from keras_psplus.planning.traits import Traits, traits_of

DENSE = Work([Variable((1000, 1000), factor_rows=10), Variable((1000,))])
SPARSE = Work([Variable((10, 10))], [Table(100_000, 10, {1: 1000, 2: 1500, 4: 2250})])
SLOW = Cluster(workers=2, ps=2, bits_per_second=1e8)


def ms(traits, work=DENSE, cluster=SLOW, step_ms=10.0):
    return cost_model.milliseconds(traits, work, step_ms, cluster)


def test_one_process_takes_its_step():
    assert ms(Traits("alone")) == 10.0


def test_bytes_take_their_time():
    # A ring of two sends every byte once, in two messages. In one bucket, a core takes its time for
    # them before and after the link.
    link_ms, core_ms = 1.09 * 8e3 * 4 * 1_001_000 / 1e8, 2 * 4 * 1.001
    assert ms(Traits()) == pytest.approx(10 + 1 + link_ms + core_ms)
    # Of eight buckets, seven cross the link meanwhile.
    more = Work([Variable((1 << 20, 8))])
    link_ms, core_ms = 1.09 * 8e3 * (1 << 25) / 1e8, 2 * (1 << 25) / 1e6
    assert ms(Traits(), more) == pytest.approx(10 + 1 + link_ms + core_ms / 8)
    # Over the fastest link it is a core that sends and receives them.
    fast = dataclasses.replace(SLOW, bits_per_second=None, processor=3.0)
    assert ms(Traits(), cluster=fast) == pytest.approx(10 + 3 + 3 * 2 * 4 * 1.001)


def test_factors_go_where_they_are_fewer_bytes():
    moved = cost_model.flows(Traits(compression="factors"), DENSE, 2)
    assert moved.between == 4 * (10 * 2000 + 1000)
    # From 2 x 1,000 x 1,000 / (2,000 x 10) workers on, the gradient itself is no more.
    assert link_bytes.goes_as_factors(DENSE.variables[0], "factors", 100)
    assert not link_bytes.goes_as_factors(DENSE.variables[0], "factors", 101)
    unknown = Work([Variable((1000, 1000)), Variable((1000,))])
    assert cost_model.flows(Traits(compression="factors"), unknown, 2) == cost_model.flows(
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
    hybrid = cost_model.flows(Traits("hybrid"), SPARSE, 2)
    assert hybrid == (400, 1000 * (8 + 8 + 40), 1000 * 40)
    small = Work(SPARSE.variables, [Table(1000, 10, {1: 100})])
    assert cost_model.flows(Traits("hybrid"), small, 2) == cost_model.flows(Traits(), small, 2)


def test_local_steps_under_servers_send_whole_tables():
    moved = cost_model.flows(Traits("parameter_server", updates="local", every=8), SPARSE, 2)
    assert moved.up == moved.down == 4 * (100 + 1_000_000) / 8


def test_more_workers_share_the_servers():
    async_ = Traits("parameter_server", waits=False)
    four = dataclasses.replace(SLOW, workers=4)
    assert ms(async_, cluster=four) == pytest.approx(2 * ms(async_, step_ms=0.0) + 10 - 9)


def test_where_it_stops_to_scale_and_why():
    def scales(traits, work=DENSE, step_ms=1.0):
        return cost_model.scales_to(traits, work, step_ms, SLOW)

    assert scales(Traits("alone")) == (1, None)
    # What workers gather grows with them; what they sum on its way does not.
    # A step of 349 ms at two, 698 at many; and half a millisecond for each message of a ring.
    assert scales(Traits(compression="topk:0.01")) == (1, "links")
    assert scales(Traits(compression="topk:0.01"), step_ms=100.0) == (16, "links")
    assert scales(Traits()) == (512, "messages")
    # From 101 workers on, factors are as many bytes as what a ring sends.
    assert scales(Traits(compression="factors"), step_ms=100.0) == (1024, "messages")
    # Two servers are enough for two workers.
    assert scales(Traits("parameter_server", waits=False)) == (2, "servers")
    assert scales(Traits("parameter_server", waits=False), step_ms=1e9) == (4096, None)


def test_delay_counts_for_each_message_of_a_ring():
    late = dataclasses.replace(SLOW, workers=4, delay_ms=10.0)
    soon = dataclasses.replace(late, delay_ms=0.0)
    assert ms(Traits(), cluster=late) - ms(Traits(), cluster=soon) == pytest.approx(60)
    local = Traits(updates="local", every=10)
    assert ms(local, cluster=late) - ms(local, cluster=soon) == pytest.approx(6)


def test_memory_of_a_worker():
    def megabytes(traits, slots=2.0):
        return cost_model.memory(traits, dataclasses.replace(SPARSE, slots=slots), 4) / 4

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
    together, odd = Traits("tensor_parallel"), link_bytes.Variable((10, 3), factor_rows=8)
    dense = link_bytes.Variable((1000, 20), factor_rows=8)
    # Of 32 rows on all workers, an output is gathered and an input's gradient is summed.
    moved = cost_model.flows(together, link_bytes.Work([dense, odd]), 4)
    assert moved.between == 0.75 * 4 * 32 * (20 + 2 * 1000) and not moved.up + moved.down
    # A convolution's kernel is gathered.
    conv = link_bytes.Work([link_bytes.Variable((3, 3, 4, 8))])
    assert cost_model.flows(together, conv, 4).between == 0.75 * 4 * 288
    work = link_bytes.Work([dense, odd], slots=2.0)
    assert cost_model.memory(together, work, 4) == 4 * 4 * (20_000 / 4 + 30)
    # Each worker computes layers that cannot be cut for all.
    parts = cost_model.parts(
        together, link_bytes.Work([odd]), 10.0, dataclasses.replace(SLOW, workers=4)
    )
    assert parts.computing == 40 and parts.messages == 0
    tables = dataclasses.replace(SPARSE, variables=[])
    rows = SPARSE.tables[0].rows_of(1) * SPARSE.tables[0].dim
    assert cost_model.flows(together, tables, 4).between == 6 * 4 * rows


def test_bytes_of_shares():
    def sent(shard, work):
        return cost_model.flows(Traits(shard=shard), work, 4).between

    dense = link_bytes.Work([link_bytes.Variable((1000, 10))])
    assert sent("optimizer", dense) == sent(None, dense) == 1.5 * 40_000
    assert sent("all", dense) == 1.5 * sent(None, dense)
    # A table is gathered whole, and once, though rows are all that is looked up.
    table = 0.75 * 4 * 1_000_000
    with_slots = dataclasses.replace(SPARSE, slots=1.0)
    assert sent("optimizer", with_slots) == sent(None, SPARSE) + table
    assert sent("optimizer", SPARSE) == sent(None, SPARSE)
    assert sent("all", SPARSE) == sent(None, SPARSE) + 0.75 * 4 * 100 + table


@pytest.mark.parametrize(
    ("source", "loses"),
    [
        ("psp.MultiWorkerMirroredStrategy(**options)", "exact"),
        ("psp.MultiWorkerMirroredStrategy(compression='factors')", "exact"),
        ("psp.MultiWorkerMirroredStrategy(compression='factors:bf16')", "lossy"),
        ("psp.MultiWorkerMirroredStrategy(updates=psp.updates.Accumulate(4))", "batch x4"),
        (
            "psp.MultiWorkerMirroredStrategy(compression='int8', updates=psp.updates.DiLoCo(2))",
            "local steps, lossy",
        ),
        ("psp.ParameterServerStrategy(mode='sync')", "exact"),
        ("psp.ParameterServerStrategy(pull_compression='bf16')", "stale, lossy"),
        ("psp.HybridStrategy()", "exact"),
        ("psp.HybridStrategy(prefetch=True)", "stale"),
    ],
)
def test_what_an_entry_loses(source, loses):
    assert traits_of(f"def strategy(**options):\n    return {source}\n").loses == loses
