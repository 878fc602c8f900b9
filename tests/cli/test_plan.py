"""`keras-psplus plan`: plans of a pipeline, and what each entry takes, without training."""

import functools
import json
import re
import textwrap

import pytest

from keras_psplus import catalogue
from keras_psplus.cli import main
from keras_psplus.cli import plan as plan_command
from tests.support.tables import for_each
from tests.support.tiers import extended

SCRIPT = """
import sys
import keras
import numpy as np
import keras_psplus as psp

print("noise of the script")
kind = sys.argv[1]
strategies = {
    "own": lambda: psp.PipelineStrategy(microbatches=2),
    "other": psp.MultiWorkerMirroredStrategy,
    "servers": lambda: psp.ParameterServerStrategy(mode="sync"),
    "pipeline": psp.PipelineStrategy,
}
strategy = strategies.get(kind, psp.strategy_from_env)()
if kind == "fails":
    raise RuntimeError("of the script's own")
layers = keras.layers
with strategy.scope():
    if kind in ("own", "deep", "other"):
        model = keras.Sequential([layers.Dense(16) for _ in range(4)])
        x = y = np.zeros((32, 16), "float32")
        loss = "mse"
    else:
        ids = keras.Input((4,), dtype="int32")
        rows = layers.Flatten()(layers.Embedding(40_000, 8, name="table")(ids))
        outputs = layers.Dense(10)(layers.Dense(48, activation="relu")(rows))
        model = keras.Model(ids, outputs, name="small")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # Each row looks up one row of its own, and three that all have.
        x = np.stack([np.arange(96) + 100, *np.ones((3, 96), int) * [[1], [2], [3]]], 1)
        y = np.zeros(96, int)
    model.compile("adam", loss, metrics=["accuracy"])
if kind == "batch":
    model.train_on_batch(x, y)
if kind != "ends":
    model.fit(x, y, batch_size=len(x) // 3 if len(x) == 96 else 16, epochs=2)
    open(sys.argv[2], "w").close()
"""
LINKS = {
    "hosts": ["worker-0", "worker-1", "worker-2"],
    "links": [
        {"hosts": ["worker-0", "worker-1"], "latency_ms": 0.4, "bits_per_second": 9e8},
        {"hosts": ["worker-0", "worker-2"], "latency_ms": 2.5, "bits_per_second": 8e7},
        {"hosts": ["worker-1", "worker-2"], "latency_ms": 2.0, "bits_per_second": 9e7},
    ],
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """`plan.ask`, which runs the script once for plans that differ in flags alone."""
    folder = tmp_path_factory.mktemp("plan")
    script, trained = folder / "train.py", folder / "trained"
    script.write_text(SCRIPT)
    ask_script = plan_command.ask
    ask = functools.cache(lambda command, options: ask_script(list(command), **dict(options)))

    def cached(command, **options):
        answer = ask(tuple(command), tuple(options.items()))
        assert not trained.exists()
        return answer

    cached.arguments = lambda kind: [str(script), kind, str(trained)]
    return cached


@pytest.fixture
def plan(asked, capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "nonsense")
    monkeypatch.setenv("KERAS_PSPLUS_COMPRESSION", "bf16")
    monkeypatch.setenv("KERAS_PSPLUS_STRATEGY", "hybrid")
    monkeypatch.setattr(plan_command, "ask", asked)

    def run(*flags, kind="named"):
        return main.main(["plan", *flags, *asked.arguments(kind)]), capsys.readouterr()

    return run


def test_stages_of_a_pipeline(plan):
    flags = ["--stages=4", "--microbatches=8", "--schedule=1f1b"]
    code, printed = plan(*flags, "--json", kind="own")
    assert code == 0
    found = json.loads(printed.out)
    names = ["dense", "dense_1", "dense_2", "dense_3"]
    assert [stage["layers"][0] for stage in found["stages"]] == names
    assert (found["microbatches"], found["schedule"], found["rows"]) == (8, "1f1b", 16)
    assert all(stage["estimate"]["slots"] == 2 * 4 * 272 for stage in found["stages"])
    # A table, and nothing else.
    code, printed = plan(*flags, kind="own")
    assert code == 0 and printed.err == ""
    head, titles, *stages = printed.out.splitlines()
    assert head.startswith("'sequential' in 4 stages, batches of 16 rows in 8 micro-batches")
    assert titles.split()[:3] == ["stage", "device", "layers"]
    assert [line.split()[0] for line in stages] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    "flags, kind, message",
    [
        ([], "pipeline", "or say --stages for the plan of a pipeline"),
        *extended(
            (["--stages=5"], "deep", "of 4 layer(s) cannot be cut into 5 stages"),
            (["--stages=2"], "ends", "ended without a call of `fit`"),
            (["--stages=2"], "other", "makes the plan of a pipeline"),
            ([], "batch", "Received: train_on_batch()"),
        ),
    ],
)
def test_no_plan(flags, kind, message, plan):
    code, printed = plan(*flags, kind=kind)
    assert code == 1
    assert message in printed.err and "Received: " in printed.err
    assert "Traceback" not in printed.err and printed.out == ""


def test_a_script_that_fails(plan):
    code, printed = plan("--stages=2", kind="fails")
    assert code == 1
    assert "Traceback" in printed.err and "of the script's own" in printed.err


def test_measurements_of_a_script(plan):
    flags = ["--workers=4", "--ps=2", "--link=100mbit", "--delay=1", "--memory=5MB", "--json"]
    code, printed = plan(*flags, kind="named")
    assert code == 0, printed.err
    found = json.loads(printed.out)
    assert found["cluster"] == {
        "workers": 4,
        "ps": 2,
        "bits_per_second": 1e8,
        "delay_ms": 1.0,
        "memory": 5e6,
    }
    measured = found["measured"]
    assert (measured["model"], measured["batch_rows"], measured["rows"]) == ("small", 32, 8)
    assert 0 < measured["step_ms"] <= measured["single_ms"]
    # Of 8 rows of a worker, the two kernels' gradients are products; vectors' are not.
    variables = [(v["shape"], v["factor_rows"]) for v in measured["work"]["variables"]]
    expected = [([10], None), ([32, 48], 8), ([48, 10], 8), ([48], None)]
    assert sorted(variables, key=str) == expected
    (table,) = measured["work"]["tables"]
    # Three rows are in all batches.
    touched = {"1": 11.0, "2": 19.0, "4": 35.0, "8": 67.0}
    assert table == {"rows": 40_000, "dim": 8, "touched": touched}
    assert measured["work"]["slots"] == pytest.approx(2, rel=0.01)
    by_name = {row["entry"]: row for row in found["entries"]}
    apart = ("pipedream", "pipeline", "pipeline_gpipe")
    assert sorted(by_name) == [name for name in catalogue.ENTRIES if name not in apart]
    # By hand: ids up to read, ids and rows up to update, rows down; 2 x 3 / 4 of a sum.
    dense = 4 * (32 * 48 + 48 + 48 * 10 + 10)
    assert by_name["hybrid"]["sent"] == 1.5 * dense + 11 * (8 + 8 + 32)
    assert by_name["all_reduce"]["sent"] == 1.5 * dense + 3 * 11 * (8 + 32)
    assert by_name["sync_parameter_server"]["received"] == dense + 11 * 32
    assert by_name["single"]["floor_ms"] == measured["single_ms"]
    # A millisecond for each of the six rounds of a ring of four.
    assert by_name["all_reduce"]["floor_ms"] == measured["step_ms"] + 6


@pytest.mark.parametrize("workers, kind", [(4, "named"), *extended((1024, "servers"))])
def test_a_table_and_nothing_else(workers, kind, plan):
    code, printed = plan(f"--workers={workers}", "--ps=0", kind=kind)
    assert code == 0 and printed.err == ""
    head, *grown, titles = printed.out.splitlines()[: 2 + (workers > 32)]
    rows = printed.out.splitlines()[2 + len(grown) :]
    rows_each = max(1, 32 // workers)
    links = "0 ps, links of 1000 Mbit/s"
    assert head.startswith(f"'small' on {workers} workers and {links}: {rows_each} rows")
    assert not grown or "the batch of 32 rows is taken to grow to 1024" in grown[0]
    assert titles.split()[-3:] == ["floor", "ms", "loses"]
    (ring,) = [line.split() for line in rows if line.startswith("all_reduce ")]
    assert (ring[3], ring[-1]) == (str(2 * (workers - 1)), "exact")
    entries = [line.split()[0] for line in rows]
    assert "all_reduce_topk" in entries and "hybrid" not in entries
    assert rows[-1].startswith("pipedream, pipeline, pipeline_gpipe: see keras-psplus plan")


def test_links_of_a_file(plan, tmp_path, asked, monkeypatch):
    # The script is not run for three workers.
    four = {"workers": 4}
    monkeypatch.setattr(plan_command, "ask", lambda command, **o: asked(command, **{**o, **four}))
    path = tmp_path / "links.json"
    path.write_text(json.dumps(LINKS))
    code, printed = plan(f"--links={path}", "--ps=0", "--json")
    assert code == 0, printed.err
    cluster = json.loads(printed.out)["cluster"]
    # As slow as the slowest link.
    assert (cluster["workers"], cluster["ps"]) == (3, 0)
    assert (cluster["bits_per_second"], cluster["delay_ms"]) == (8e7, 2.5)


@for_each(
    "flags, change, message",
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
    assert code == 2 and re.search(message, printed.err), printed.err


@for_each(
    "argv, message",
    [
        (["--schedule=1f1b", "train.py"], "--schedule goes with --stages. Received: --schedule"),
        (["--microbatches=2", "train.py"], "--microbatches goes with --stages"),
        (["--stages=2", "--workers=2", "train.py"], "--workers does not go with --stages"),
        (["--link=fast", "train.py"], "such as 100mbit or 1gbit. Received: 'fast'"),
        (["--link=0mbit", "train.py"], "Received: '0mbit'"),
        (["--workers=0", "train.py"], "--workers"),
        (["--delay=-1", "train.py"], "--delay"),
        ([], "name the script"),
        (["--stages=2"], "name the script"),
        (["--stages=2", "nothing.py"], "no script 'nothing.py'"),
        (["--stages=0", "train.py"], "--stages"),
        (["--stages=2", "--schedule=2f2b", "train.py"], "--schedule"),
    ],
)
def test_wrong_command_lines(argv, message, capsys):
    assert main.main(["plan", *argv]) == 2
    assert message in capsys.readouterr().err


def test_help(capsys):
    assert main.main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    assert textwrap.dedent(plan_command._USAGE).strip() in out
    flags = ("--stages", "--microbatches", "--schedule", "--[no]json")
    assert all(flag in out for flag in (*flags, "--workers", "--ps", "--link", "--delay"))
