"""`keras-psplus plan` without stages: what each entry of the catalogue would take of a script."""

import json

import pytest

from keras_psplus import catalogue
from keras_psplus.cli import main

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
strategy = strategies.get(kind, psp.strategy)()
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
    flags = ["--workers=4", "--ps=2", "--link=100mbit", "--delay=1", "--json"]
    code, printed = plan(*flags, kind=kind)
    assert code == 0, printed.err
    found = json.loads(printed.out)
    assert {**found["cluster"], "processor": 1.0} == {
        "workers": 4,
        "ps": 2,
        "bits_per_second": 1e8,
        "delay_ms": 1.0,
        "processor": 1.0,
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
    assert measured["slots"] == pytest.approx(2, rel=0.01)
    names = [choice["entry"] for choice in found["choices"]]
    assert sorted(names) == [n for n in catalogue.names() if not n.startswith("pipe")]
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
    assert "scales to" in titles
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
