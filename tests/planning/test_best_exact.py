"""What `auto` takes in which cluster, by a plan and without one."""

import dataclasses
import json

import pytest

from keras_psplus.planning import best_exact, choices, plan_file
from keras_psplus.planning.best_exact import NoPlanError
from keras_psplus.planning.choices import Facts
from keras_psplus.planning.cost_model import Cluster
from keras_psplus.planning.traits import Traits

ENTRIES = {
    "single": Traits("alone"),
    "all_reduce": Traits(),
    "all_reduce_bf16": Traits(compression="bf16"),
    "all_reduce_factors": Traits(compression="factors"),
    "accumulated": Traits(updates="accumulate", every=4),
    "async": Traits("parameter_server", waits=False),
    "sync": Traits("parameter_server"),
    "hybrid": Traits("hybrid"),
}
TABLE = {"rows": 1_000_000, "dim": 32, "touched": {"1": 2_000.0, "2": 3_000.0, "4": 4_500.0}}
FACTS = Facts.from_json(
    {
        "model": "m",
        "batch_rows": 64,
        "rows": 32,
        "step_ms": 10.0,
        "single_ms": 16.0,
        "variables": [
            {"shape": [1000, 1000], "factor_rows": 32},
            {"shape": [9], "factor_rows": None},
        ],
        "tables": [TABLE],
    }
)
SLOW = Cluster(bits_per_second=1e8)


def choose(facts=FACTS, link=SLOW, workers=2, ps=0, chief=False):
    return best_exact.choose(facts, link, ENTRIES, workers=workers, ps=ps, chief=chief)


def test_workers_alone_all_reduce():
    dense = dataclasses.replace(FACTS, work=dataclasses.replace(FACTS.work, tables=[]))
    chosen = choose(dense)
    assert chosen.entry == "all_reduce_factors"
    expected = choices.choose(dense, ENTRIES, dataclasses.replace(SLOW, ps=0))
    times = {choice.entry: choice.prediction.ms for choice in expected.choices}
    assert f"{times['all_reduce_factors']:.4g} ms predicted for a step of 64 rows" in str(chosen)
    # Only what trains as one process does is compared.
    assert chosen.reason.count("(all_reduce ") == 1 and "bf16" not in chosen.reason
    assert f"(all_reduce {times['all_reduce']:.4g})" in chosen.reason
    assert "one process alone would be faster, with 16 ms" in chosen.reason
    # Over a fast link factors are not worth it.
    long = dataclasses.replace(dense, step_ms=3000.0, single_ms=6000.0)
    fast = choose(long, Cluster(bits_per_second=1e10))
    assert fast.entry == "all_reduce" and "alone" not in fast.reason


def test_servers_are_used_where_there_are_some():
    rows = dataclasses.replace(FACTS, work=dataclasses.replace(FACTS.work, variables=[]))
    chosen = choose(rows, ps=2, chief=True)
    assert chosen.entry == "hybrid" and "(sync " in chosen.reason and "async" not in chosen.reason
    assert "for 1 chief + 2 worker(s) + 2 ps" in chosen.reason
    # Without messages between workers, servers alone can be the better way: many small workers.
    far = dataclasses.replace(SLOW, delay_ms=100.0)
    assert choose(rows, far, workers=16, ps=16, chief=True).entry == "hybrid"
    assert choose(link=far, workers=16, ps=16, chief=True).entry == "sync"


def test_what_needs_no_plan():
    # `ParameterServerStrategy` needs a chief, so that there is one left.
    assert choose(None, ps=1).entry == "hybrid"
    assert "the only exact entry for 2 worker(s) + 1 ps" in choose(None, ps=1).reason
    with pytest.raises(NoPlanError, match="all_reduce, all_reduce_factors.*Received: 2 worker"):
        choose(None)
    with pytest.raises(NoPlanError, match="hybrid, sync"):
        choose(None, ps=1, chief=True)


def test_what_nothing_trains_on():
    with pytest.raises(ValueError, match="no exact entry.*Received: 2 ps"):
        choose(workers=0, ps=2)


def test_facts_of_another_number_of_workers():
    assert FACTS.shared_by(2) is FACTS
    four = FACTS.shared_by(4)
    # Along the line through what was measured of 32 and of 64 rows.
    assert (four.rows, four.step_ms, four.single_ms) == (16, 7.0, 16.0)
    assert [v.factor_rows for v in four.work.variables] == [16, None]
    assert four.work.tables[0].touched == {
        1: pytest.approx(2000 / 1.5), 2: 2000, 4: 3000,
    }  # fmt: skip
    one = FACTS.shared_by(1)
    assert (one.rows, one.step_ms, one.work.variables[0].factor_rows) == (64, 16.0, 64)
    assert four.one_worker_ms(4) == FACTS.one_worker_ms(2) == 16
    # Of one measurement, rows in proportion.
    alone = dataclasses.replace(FACTS, rows=64, step_ms=16.0)
    assert alone.shared_by(4).step_ms == 4


@pytest.fixture
def plan(tmp_path):
    made = choices.choose(FACTS, ENTRIES, Cluster(2, 1, 2e8, 0.5)).as_dict()

    def write(change=lambda plan: plan):
        path = tmp_path / "plan.json"
        plan = change(json.loads(json.dumps(made)))
        path.write_text(plan if isinstance(plan, str) else json.dumps(plan))
        return path

    return write


def test_a_plan_is_read_as_it_was_made(plan):
    facts, cluster = plan_file.read(plan())
    assert facts.work.tables == FACTS.work.tables
    assert [v.shape for v in facts.work.variables] == [(1000, 1000), (9,)]
    assert cluster == Cluster(2, 1, 2e8, 0.5)
    again = choices.choose(facts, ENTRIES, cluster)
    assert again.as_dict() == choices.choose(FACTS, ENTRIES, Cluster(2, 1, 2e8, 0.5)).as_dict()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((), "[", "JSONDecodeError"),
        ((), [], "TypeError"),
        (("measured",), None, "TypeError"),
        (("measured", "work"), {}, "KeyError: 'variables'"),
        (("measured", "step_ms"), -1.0, "step_ms must be above 0 and finite, and is -1.0"),
        (("measured", "step_ms"), "fast", "TypeError"),
        (("measured", "surprise"), 1, "surprise"),
        (("cluster", "bits_per_second"), 0, "bits_per_second must be above 0 and finite, and is 0"),
        (("cluster", "delay_ms"), -2, "delay_ms must be 0 or more and finite, and is -2"),
    ],
)
def test_what_is_no_plan(path, value, message, plan):
    def change(made):
        if not path:
            return value
        place = made
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        return made

    file = plan(change)
    with pytest.raises(ValueError, match=message) as error:
        plan_file.read(file)
    assert "a plan is what `keras-psplus plan --json" in str(error.value)
    assert str(error.value).endswith(f"Received: {file}")


def test_the_plan_of_a_pipeline_is_none(plan):
    with pytest.raises(ValueError, match="without --stages"):
        plan_file.read(plan(lambda made: {"stages": [], "microbatches": 4}))
