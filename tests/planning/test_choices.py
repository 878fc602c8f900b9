"""The plan of what was measured: which is recommended, and why."""

import dataclasses
import json

import pytest

from keras_psplus.planning import choices, cost_model
from keras_psplus.planning.choices import Facts
from keras_psplus.planning.cost_model import Cluster
from keras_psplus.planning.traits import Traits

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
    return choices.choose(given, ENTRIES, Cluster(**cluster))


def test_the_plainest_of_what_takes_as_long_is_recommended():
    made = plan(facts(100.0, 200.0))
    assert made.recommended.entry == "all_reduce"
    assert made.recommended.speedup == pytest.approx(200 / made.recommended.prediction.ms)
    # Others follow by their milliseconds.
    times = [choice.prediction.ms for choice in made.choices[1:]]
    assert times == sorted(times) and len(times) == 8
    assert "`all_reduce_topk` takes" in made.reason and "but: lossy" in made.reason


def test_factors_and_tables_are_recommended_where_they_help():
    made = plan(facts(300.0, 900.0, factor_rows=32), bits_per_second=1e8)
    assert made.recommended.entry == "all_reduce_factors"
    made = plan(facts(100.0, 400.0, tables=[TABLE]), workers=4, ps=4)
    assert made.recommended.entry == "hybrid"
    without = plan(facts(100.0, 400.0, tables=[TABLE]), workers=4, ps=0)
    assert {"hybrid", "sync_parameter_server"}.isdisjoint(c.entry for c in without.choices)


def test_one_process_is_recommended_where_links_are_too_slow():
    made = plan(facts(), bits_per_second=1e6)
    assert made.recommended.entry == "single" and made.recommended.speedup == 1
    assert "too slow" in made.reason and "`all_reduce` is the best exact one" in made.reason


def test_shares_are_recommended_where_all_reduce_does_not_fit():
    given = facts(100.0, 400.0)  # a million weights, and two slots for each
    assert plan(given, workers=4, ps=0, memory=17e6).recommended.entry == "all_reduce"
    made = plan(given, workers=4, ps=0, memory=12e6)
    assert made.recommended.entry == "zero"
    fits = "fits into a worker's memory, unlike `all_reduce`, `all_reduce_factors`, `single`"
    assert fits in made.reason
    assert "too much" in str(made) and "all_reduce_topk` takes" not in made.reason
    assert plan(given, workers=4, ps=0, memory=9e6).recommended.entry == "fsdp"
    # Without a whole gradient of the largest weight.
    assert plan(given, workers=4, ps=0, memory=6e6).recommended.entry == "tensor_parallel"
    none = plan(given, workers=4, ps=0, memory=1e6)
    assert none.recommended.entry == "tensor_parallel"
    assert none.reason.startswith("No exact entry fits into the memory of a worker; `tensor_par")


def test_a_slower_processor_compresses_in_more_time():
    slower = dataclasses.replace(facts(), int8_ms=10 * 1.67)
    times = [
        {choice.entry: choice.prediction.ms for choice in plan(one, bits_per_second=1e7).choices}
        for one in (facts(), slower)
    ]
    # A million elements, a message to the other worker, and what goes there and comes from there.
    moved = cost_model.flows(Traits(compression="topk:0.01"), facts().work, 2).between
    assert times[1]["all_reduce_topk"] - times[0]["all_reduce_topk"] == pytest.approx(
        9 * (1.98 + 0.5 + 2 * moved / 1e6)
    )
    assert times[1]["single"] == times[0]["single"]


def test_one_worker_on_the_rows_of_all():
    assert facts().one_worker_ms(2) == 20
    assert facts().one_worker_ms(8) == pytest.approx(20 + 192 * 10 / 32)
    made = plan(facts(), workers=8)
    assert "the batch of 64 rows is taken to grow to 256" in str(made)


def test_text_and_json_say_the_same():
    made = plan(facts(100.0, 200.0, tables=[TABLE]))
    head, titles, first, *_ = str(made).splitlines()
    assert head.startswith("'m' on 2 workers and 2 ps, links of 1000 Mbit/s: 32 rows a worker")
    assert "1 table(s) of 32,000,000, of which a batch looks up 20,000 row(s)" in head
    assert titles.split()[:2] == ["entry", "ms"]
    found = json.loads(json.dumps(made.as_dict()))
    assert found["recommended"] == first.split()[0] == found["choices"][0]["entry"]
    assert found["choices"][0]["ms"] == made.recommended.prediction.ms
    assert found["measured"]["work"]["tables"][0]["touched"] == {"1": 20_000.0, "2": 30_000.0}
