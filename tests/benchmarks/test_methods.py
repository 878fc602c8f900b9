"""Which methods there are, what they send at least, and what is launched for them."""

import types

import pytest
from lab import document, entries, ideal, launches, methods, work

from keras_psplus import catalogue

DENSE, SPARSE = work.SIZES["full"]["dense"], work.SIZES["full"]["sparse"]
WHOLE = 4 * (784 * 1600 + 1600 * 1600 + 1600 * 700 + 700 * 10 + 1600 + 1600 + 700 + 10)
SETTINGS = {"size": "tiny", "ps": 1, "delay": 0.0, "links": "loopback"}


def test_every_entry_of_the_catalogue_is_a_method():
    found = {m.name: m for m in methods.catalogue()}
    pipelines = {"pipedream", "pipeline", "pipeline_gpipe"}
    assert set(found) == {*catalogue.ENTRIES, *entries.ENTRIES} - pipelines
    paths = {name: entry.traits.path for name, entry in found.items()}
    assert paths["single"] == "alone" and paths["hybrid"] == "hybrid"
    assert all(("parameter_server" in n or "_ps_" in n) == (p == "parameter_server")
               for n, p in paths.items())  # fmt: skip
    assert found["diloco"].traits == methods.Traits(
        "all_reduce", "int8", "int8", updates="local", every=32
    )
    assert found["async_parameter_server_int8"].traits == methods.Traits(
        "parameter_server", "int8", "int8", "bf16", waits=False
    )
    assert found["sync_parameter_server"].traits.waits
    assert found["no_communication"].traits == methods.Traits(compression="nothing", rows="nothing")
    assert found["hybrid_int8"].traits == methods.Traits("hybrid", None, "int8", "int8")
    assert found["hybrid_8_steps"].traits == methods.Traits("hybrid", together=8)


def test_entries_of_the_lab_are_what_strategies_take(monkeypatch):
    monkeypatch.setenv("LAB_RACKS", "[0, 1]")
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, entry in entries.ENTRIES.items():
        if entry.strategy != "ParameterServerStrategy" and name not in entries.COMPILED:
            entries.make(name)


def test_tasks_of_a_method():
    server = methods.Method("tf_keras", "ps", methods.Traits("parameter_server"))
    assert server.jobs(2, 1) == ["worker", "worker", "ps", "chief"]
    hybrid = methods.Method("keras_psplus", "hybrid", methods.Traits("hybrid"))
    assert hybrid.jobs(1, 2) == ["worker", "ps", "ps"]
    assert methods.Method("torch", "ddp", methods.Traits()).jobs(2, 2) == ["worker", "worker"]


def test_selection_brings_what_is_compared_with():
    everything = [*methods.tf_keras(), *methods.torch(), *methods.jax()]

    def names(*patterns):
        return [method.full_name for method in methods.select(everything, patterns)]

    assert names("ddp_bf16") == ["torch/alone", "torch/ddp_bf16"]
    assert names("all_reduce", "torch/*sgd_8") == [
        "tf_keras/alone",
        "tf_keras/all_reduce",
        "torch/alone",
        "torch/post_local_sgd_8",
    ]
    assert names("jax/data*") == ["jax/alone", "jax/data_parallel"]
    assert len(names()) == len(everything)
    with pytest.raises(ValueError, match=r"There are: tf_keras/alone.*Received: 'dpd'"):
        names("ddp", "dpd")


@pytest.mark.parametrize(
    ("traits", "workers", "megabytes"),
    [
        (methods.Traits(), 2, WHOLE / 1e6),
        (methods.Traits(), 4, 1.5 * WHOLE / 1e6),
        (methods.Traits(compression="bf16"), 2, WHOLE / 2e6),
        # Measured, see benchmarks/results/tables.md.
        (methods.Traits(compression="int8"), 2, 5.035),
        (methods.Traits(compression="topk:0.01"), 2, 0.312),
        (methods.Traits(compression="randomk:0.01"), 4, 0.320),
        (methods.Traits(compression="powersgd:4"), 2, 0.153),
        (methods.Traits(updates="accumulate", every=4), 2, WHOLE / 4e6),
        (methods.Traits(compression="int8", updates="local", every=32), 2, 5.035 / 32),
        (methods.Traits(compression="nothing"), 4, 0.0),
        (methods.Traits("alone"), 4, 0.0),
        # Of two servers' links, each carries the half for four workers.
        (methods.Traits("parameter_server"), 4, 2 * WHOLE / 1e6),
        (methods.Traits("parameter_server", updates="local", every=8), 2, WHOLE / 8e6),
    ],
)
def test_fewest_bytes_of_the_dense_model(traits, workers, megabytes):
    assert ideal.busiest(traits, DENSE, workers, 2) / 1e6 == pytest.approx(megabytes, rel=0.005)


def test_fewest_bytes_of_the_sparse_model():
    rows = SPARSE.rows_of(1)
    dense = 4 * (32 * 64 + 64 + 64 * 1000 + 1000)
    all_reduce = ideal.links(methods.Traits(), SPARSE, 2, 2)
    assert all_reduce == {"worker": (pytest.approx(dense + rows * 136),) * 2}
    hybrid = ideal.links(methods.Traits("hybrid"), SPARSE, 2, 2)
    assert hybrid["worker"] == (
        pytest.approx(dense + rows * (136 + 8)),
        pytest.approx(dense + rows * 128),
    )
    assert hybrid["ps"] == (pytest.approx(rows * 128), pytest.approx(rows * 144))
    # Batches share their frequent rows.
    assert rows < SPARSE.rows_of(4) < 4 * rows


def test_plans_are_of_whole_rounds():
    def plan(traits, rate):
        method = methods.Method("keras_psplus", "x", traits)
        return launches.plan(method, "dense", "full", 2, 2, [rate], seconds=1.0)

    assert plan(methods.Traits(), "100mbit")["phases"][0]["windows"] == 3
    assert plan(methods.Traits(), "loopback")["phases"][0]["windows"] > 3
    assert plan(methods.Traits(updates="local", every=32), "1gbit")["window"] == 32
    together = plan(methods.Traits(updates="local", every=12, together=8), "1gbit")
    assert (together["window"], together["together"]) == (24, 8)
    server = methods.Traits("parameter_server", updates="accumulate", every=4, waits=False)
    assert plan(server, "1gbit")["window"] == 8


@pytest.fixture
def file(tmp_path):
    return document.Document(tmp_path / "bench.json", SETTINGS)


def result(method="ddp", rate="1gbit", work="dense", **figures):
    key = {"turn": 0, "work": work, "workers": 2, "library": "torch"}
    return {**key, "method": method, "rate": rate, **figures}


def test_an_interrupted_run_goes_on(file, tmp_path):
    everything = methods.select(methods.torch(), ["ddp"])
    works, rates = ["dense", "sparse"], ["1gbit", "100mbit"]

    def missing(file):
        return [
            (method.name, by_work)
            for _, _, method, by_work in launches.missing(file, everything, works, [2], rates, 1)
        ]

    assert missing(file) == [
        # What sends nothing takes as long at any rate, and its tasks do not end together.
        ("alone", {"dense": ["loopback"]}),
        ("alone", {"sparse": ["loopback"]}),
        ("ddp", {"dense": rates, "sparse": rates}),
    ]
    file.add([result("alone", "loopback", name, times=[1.0]) for name in works])
    file.add([result(times=[3.0]), result(rate="100mbit", error="did not end")])
    file.add([result(work="sparse", rate=rate, times=[2.0]) for rate in rates])
    again = document.Document(file.path, SETTINGS)
    assert missing(again) == [("ddp", {"dense": ["100mbit"]})]
    # What is measured anew takes the place of what there was.
    again.add([result(rate="100mbit", times=[9.0])])
    assert missing(again) == [] and len(document.read(file.path)["results"]) == 6
    assert missing(document.Document(file.path, SETTINGS, fresh=True)) != []


def test_files_of_another_kind_are_refused(file, tmp_path):
    file.add([result(times=[3.0])])
    with pytest.raises(ValueError, match="another delay.*--fresh.*Received: 5.0"):
        document.Document(file.path, {**SETTINGS, "delay": 5.0})
    other = tmp_path / "other.json"
    other.write_text('{"results": ')
    with pytest.raises(ValueError, match="no file of results"):
        document.read(other)


def test_a_failure_costs_its_own_work_only(monkeypatch):
    launched = []

    def launch(args, make_lab, method, workers, rates_by_work):
        launched.append({name: list(rates) for name, rates in rates_by_work.items()})
        if "broken" in rates_by_work:
            raise OSError("no more network namespaces")
        if "dense" in rates_by_work:
            return [{"work": "dense", "rate": "1gbit", "times": [1.0]}], "Traceback: out of luck"
        return [{"work": "sparse", "rate": r, "times": [2.0]} for r in ("1gbit", "100mbit")], None

    monkeypatch.setattr(launches, "_launch", launch)
    rates = ["1gbit", "100mbit"]
    by_work = {"dense": list(rates), "sparse": list(rates)}
    results = launches.measure(types.SimpleNamespace(), None, None, 2, by_work)
    assert launched == [{"dense": rates, "sparse": rates}, {"sparse": rates}]
    assert [(r["work"], r["rate"], "error" in r) for r in results] == [
        ("dense", "1gbit", False),
        ("dense", "100mbit", True),
        ("sparse", "1gbit", False),
        ("sparse", "100mbit", False),
    ]
    # Nor is a run lost to what befalls the lab itself.
    (failed,) = launches.measure(types.SimpleNamespace(), None, None, 2, {"broken": ["1gbit"]})
    assert failed["error"] == "OSError: no more network namespaces"
