"""The plan of what was measured: its rows, their order, text and JSON."""

import json

import pytest

from keras_psplus import planning
from keras_psplus.planning import Cluster, Facts, Traits

ENTRIES = {
    "single": Traits("alone"),
    "all_reduce": Traits(),
    "all_reduce_factors": Traits(compression="factors"),
    "all_reduce_topk": Traits(compression="topk:0.01"),
    "sync_parameter_server": Traits("parameter_server"),
    "hybrid": Traits("hybrid"),
    "zero": Traits(shard="optimizer"),
    "fsdp": Traits(shard="all"),
    "tensor_parallel": Traits("tensor_parallel"),
}


def facts(step_ms=10.0, single_ms=20.0, factor_rows=None, tables=()):
    return Facts.from_json(
        {
            "model": "m",
            "batch_rows": 64,
            "rows": 32,
            "step_ms": step_ms,
            "single_ms": single_ms,
            "slots": 2.0,
            "variables": [{"shape": [1000, 1000], "factor_rows": factor_rows}],
            "tables": list(tables),
        }
    )


TABLE = {"rows": 1_000_000, "dim": 32, "touched": {"1": 20_000.0, "2": 30_000.0}}


def plan(given, **cluster):
    return planning.plan(given, ENTRIES, Cluster(**cluster))


def test_rows_are_of_bytes_and_of_what_was_measured():
    rows = {row.entry: row for row in plan(facts(), delay_ms=2.0).rows}
    assert (rows["single"].floor_ms, rows["single"].sent) == (20.0, 0)
    # Four million bytes at 1 Gbit/s take longer than 10 ms of computing and two delays.
    ring = rows["all_reduce"]
    assert (ring.sent, ring.received, ring.rounds) == (4e6, 4e6, 2)
    assert ring.floor_ms == pytest.approx(32)
    assert ring.memory == 4e6 * 4
    assert rows["all_reduce_topk"].floor_ms == 10 + 2.0


def test_exact_entries_come_first():
    *exact, last = [row.entry for row in plan(facts()).rows]
    assert exact == sorted(ENTRIES.keys() - {last}) and last == "all_reduce_topk"


def test_servers_are_left_out_where_there_are_none():
    given = facts(100.0, 400.0, tables=[TABLE])
    entries = {row.entry for row in plan(given, workers=4, ps=0).rows}
    assert set(ENTRIES) - entries == {"hybrid", "sync_parameter_server"}


def test_what_does_not_fit_is_marked():
    given = facts(100.0, 400.0)  # a million weights, and two slots for each
    assert "too much" not in str(plan(given, workers=4, ps=0, memory=21e6))
    lines = str(plan(given, workers=4, ps=0, memory=12e6)).splitlines()
    marked = {line.split()[0] for line in lines if "too much" in line}
    assert marked == {"single", "all_reduce", "all_reduce_factors", "all_reduce_topk"}


def test_a_batch_grows_for_each_worker_to_have_a_row():
    made = plan(facts(), workers=8)
    assert "the batch of 64 rows is taken to grow to 256" in str(made)


def test_text_and_json_say_the_same():
    made = plan(facts(100.0, 200.0, tables=[TABLE]), delay_ms=0.5)
    head, titles, first, *_ = str(made).splitlines()
    assert head.startswith("'m' on 2 workers and 2 ps, links of 1000 Mbit/s and 0.5 ms: 32 rows a ")
    assert "in 100 ms, 64 in one process in 200; 1,000,000 weights" in head
    assert "1 table(s) of 32,000,000, of which a batch looks up 20,000 row(s)" in head
    assert titles.split()[:3] == ["entry", "MB", "sent"]
    found = json.loads(json.dumps(made.as_dict()))
    assert found["entries"][0]["entry"] == first.split()[0]
    assert found["entries"][0]["floor_ms"] == made.rows[0].floor_ms
    assert found["measured"]["work"]["tables"][0]["touched"] == {"1": 20_000.0, "2": 30_000.0}
