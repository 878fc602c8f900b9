"""`keras-psplus plan` without stages: what each entry of the catalogue would take of a script."""

import json
import re

import pytest

from keras_psplus.catalogue import lookup
from keras_psplus.cli import main
from keras_psplus.cluster.testing import run_in_processes

SCRIPT = """
import sys
import keras
import numpy as np
import keras_psplus as psp

print("noise of the script")
kind = sys.argv[1]
strategies = {
    "updates": lambda: psp.MultiWorkerMirroredStrategy(updates=psp.updates.LocalSGD(4)),
    "servers": lambda: psp.ParameterServerStrategy(mode="sync"),
    "pipeline": psp.PipelineStrategy,
}
strategy = strategies.get(kind, psp.strategy_from_env)()
with strategy.scope():
    ids = keras.Input((4,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(40_000, 8, name="table")(ids))
    outputs = keras.layers.Dense(10)(keras.layers.Dense(48, activation="relu")(rows))
    model = keras.Model(ids, outputs, name="small")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
# Each row looks up one row of its own, and three that all have.
x = np.stack([np.arange(96) + 100, *np.ones((3, 96), int) * [[1], [2], [3]]], 1)
y = np.zeros(96, int)
if kind == "batch":
    model.train_on_batch(x, y)
model.fit(x, y, batch_size=32, epochs=2)
open(sys.argv[2], "w").close()
"""


@pytest.fixture
def plan(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "nonsense")
    monkeypatch.setenv("KERAS_PSPLUS_STRATEGY", "hybrid")
    path, trained = tmp_path / "train.py", tmp_path / "trained"
    path.write_text(SCRIPT)

    def run(*flags, kind="named"):
        code = main.main(["plan", *flags, str(path), kind, str(trained)])
        assert not trained.exists()
        return code, capsys.readouterr()

    return run


@pytest.mark.parametrize("kind", ["named", "updates"])
def test_what_is_measured_of_a_script(kind, plan):
    flags = ["--workers=4", "--ps=2", "--link=100mbit", "--delay=1", "--memory=5MB", "--json"]
    code, printed = plan(*flags, kind=kind)
    assert code == 0, printed.err
    found = json.loads(printed.out)
    assert {**found["cluster"], "processor": 1.0} == {
        "workers": 4,
        "ps": 2,
        "bits_per_second": 1e8,
        "delay_ms": 1.0,
        "processor": 1.0,
        "memory": 5e6,
    }
    measured = found["measured"]
    assert found["cluster"]["processor"] == pytest.approx(measured["int8_ms"] / 1.67)
    assert (measured["model"], measured["batch_rows"], measured["rows"]) == ("small", 32, 8)
    assert 0 < measured["step_ms"] <= measured["single_ms"]
    # Of 8 rows of a worker, the two kernels' gradients are products; vectors' are not.
    variables = [(v["shape"], v["factor_rows"]) for v in measured["work"]["variables"]]
    assert sorted(variables, key=str) == [
        ([10], None),
        ([32, 48], 8),
        ([48, 10], 8),
        ([48], None),
    ]
    (table,) = measured["work"]["tables"]
    # Three rows are in all batches.
    touched = {"1": 11.0, "2": 19.0, "4": 35.0, "8": 67.0}
    assert table == {"rows": 40_000, "dim": 8, "touched": touched}
    assert measured["work"]["slots"] == pytest.approx(2, rel=0.01)
    names = [choice["entry"] for choice in found["choices"]]
    apart = ("auto", "pipedream", "pipeline", "pipeline_gpipe")
    assert sorted(names) == [name for name in lookup.names() if name not in apart]
    assert found["recommended"] == names[0]
    by_name = {choice["entry"]: choice for choice in found["choices"]}
    # By hand: ids up to read, ids and rows up to update, rows down; 2 x 3 / 4 of a sum.
    dense = 4 * (32 * 48 + 48 + 48 * 10 + 10)
    assert by_name["hybrid"]["sent"] == 1.5 * dense + 11 * (8 + 8 + 32)
    assert by_name["all_reduce"]["sent"] == 1.5 * dense + 3 * 11 * (8 + 32)
    assert by_name["sync_parameter_server"]["received"] == dense + 11 * 32


def test_a_table_and_nothing_else(plan):
    code, printed = plan("--workers=1024", "--ps=0", kind="servers")
    assert code == 0 and printed.err == ""
    head, grown, titles, *rows = printed.out.splitlines()
    assert head.startswith("'small' on 1024 workers and 0 ps, links of 1000 Mbit/s: 1 rows")
    assert "the batch of 32 rows is taken to grow to 1024" in grown
    assert titles.split()[-5:] == ["scales", "to", "ends", "by", "loses"]
    (ring,) = [line.split() for line in rows if line.startswith("all_reduce ")]
    (alone,) = [line.split() for line in rows if line.startswith("single ")]
    # Messages of a ring grow with the workers, and there is next to nothing to compute.
    assert ring[-2:] == ["messages", "exact"] and alone[-3:] == ["1", "-", "exact"]
    entries = [line.split()[0] for line in rows]
    assert "all_reduce_topk" in entries and "hybrid" not in entries
    assert rows[-1].startswith("pipedream, pipeline, pipeline_gpipe: see keras-psplus plan")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("pipeline", "or say --stages for the plan of a pipeline"),
        ("batch", "Received: train_on_batch()"),
    ],
)
def test_no_plan(kind, message, plan):
    code, printed = plan(kind=kind)
    assert code == 1
    assert message in printed.err and "Received: " in printed.err
    assert "Traceback" not in printed.err and printed.out == ""


LINKS = {
    "hosts": ["worker-0", "worker-1", "worker-2"],
    "links": [
        {"hosts": ["worker-0", "worker-1"], "latency_ms": 0.4, "bits_per_second": 9e8},
        {"hosts": ["worker-0", "worker-2"], "latency_ms": 2.5, "bits_per_second": 8e7},
        {"hosts": ["worker-1", "worker-2"], "latency_ms": 2.0, "bits_per_second": 9e7},
    ],
}


def test_links_of_a_file(plan, tmp_path):
    path = tmp_path / "links.json"
    path.write_text(json.dumps(LINKS))
    code, printed = plan(f"--links={path}", "--ps=0", "--json")
    assert code == 0, printed.err
    cluster = json.loads(printed.out)["cluster"]
    # As slow as the slowest link; half a millisecond is what the model takes for a message itself.
    assert (cluster["workers"], cluster["ps"]) == (3, 0)
    assert (cluster["bits_per_second"], cluster["delay_ms"]) == (8e7, 2.0)


@pytest.mark.parametrize(
    ("flags", "change", "message"),
    [
        ("--workers=4", {}, "has the links of 3 hosts.* Received: --workers=4, --links="),
        ("", {"links": LINKS["links"][:2]}, "worker-1 and worker-2 are missing. Received: "),
        ("", {"links": None}, "a file of links is what `keras-psplus doctor --links --json`"),
        ("--link=1gbit", {}, "leave out --link and --delay. Received: --links="),
        ("--delay=1", {}, "leave out --link and --delay. Received: --links="),
        ("--stages=2", {}, "--links does not go with --stages. Received: --links"),
    ],
)
def test_links_that_are_refused(flags, change, message, plan, tmp_path):
    path = tmp_path / "links.json"
    path.write_text(json.dumps({**LINKS, **change}))
    code, printed = plan(*flags.split(), f"--links={path}")
    assert code == 2 and re.search(message, printed.err)


@pytest.mark.parametrize(
    ("flags", "cluster", "message"),
    [
        ("", {}, "has to be started in each worker of a cluster.*Received: no cluster"),
        ("", {"worker": ["h:1"]}, "has to be started in each worker.*Received: worker-0"),
        ("--workers=3", {"worker": ["h:1", "h:2"]}, "has 2 workers.*Received: --workers=3"),
        ("--ps=1", {"worker": ["h:1", "h:2"]}, "the cluster has 0 ps.*Received: --ps=1"),
        ("--delay=1", {"worker": ["h:1", "h:2"]}, "the delay is measured.*Received: --delay"),
    ],
)
def test_what_cannot_be_measured(flags, cluster, message, plan, monkeypatch):
    monkeypatch.delenv("TF_CONFIG")
    if cluster:
        task = {"type": "worker", "index": 0}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    code, printed = plan("--link=measured", *flags.split())
    assert code == 2 and re.search(message, printed.err)


def test_links_are_measured_by_the_workers_of_a_cluster(tmp_path):
    def command():
        import sys

        from keras_psplus.cli import main

        sys.exit(main.main(["plan", "--link=measured", "--json", *sys.argv[1:]]))

    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = run_in_processes(
        command,
        env={"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
        args=[script, "named", tmp_path / "trained"],
    )
    assert "the chief plans" in result.logs["worker-1"]
    log = result.logs["worker-0"]
    cluster = json.loads(log[log.index("{\n") : log.rindex("}") + 1])["cluster"]
    assert (cluster["workers"], cluster["ps"]) == (2, 0)
    # Both are on this machine.
    assert cluster["bits_per_second"] > 1e6 and cluster["delay_ms"] >= 0
    assert not (tmp_path / "trained").exists()
