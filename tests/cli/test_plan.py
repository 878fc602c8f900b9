"""`keras-psplus plan`: a plan without training."""

import json
import textwrap

import pytest

from keras_psplus.cli import main
from keras_psplus.cli import plan as plan_command
from keras_psplus.cli.planning import plan_script
from keras_psplus.core.plan import plan_request

SCRIPT = """
import sys
import keras
import numpy as np
import keras_psplus as psp

print("noise of the script")
kind = sys.argv[1]
strategy = psp.PipelineStrategy(microbatches=2) if kind == "own" else psp.strategy_from_env()
if kind == "other":
    strategy = psp.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(16) for _ in range(4)])
    model.compile("adam", "mse")
if kind == "fails":
    raise RuntimeError("of the script's own")
if kind != "ends":
    x = np.zeros((32, 16), "float32")
    model.fit(x, x, batch_size=16)
    open(sys.argv[2], "w").close()
"""


@pytest.fixture
def plan(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "nonsense")
    monkeypatch.setenv("KERAS_PSPLUS_COMPRESSION", "bf16")
    path, trained = tmp_path / "train.py", tmp_path / "trained"
    path.write_text(SCRIPT)

    def run(*flags, kind="named"):
        code = main.main(["plan", *flags, str(path), kind, str(trained)])
        assert not trained.exists()
        return code, capsys.readouterr()

    return run


def test_the_command_and_the_library_mean_the_same_variable():
    assert plan_script._VARIABLE == plan_request.VARIABLE


def test_a_table_and_nothing_else(plan):
    code, printed = plan("--stages", "2")
    assert code == 0
    assert printed.err == ""
    head, names, *stages = printed.out.splitlines()
    assert head.startswith("'sequential' in 2 stages, batches of 16 rows in 4 micro-batches")
    assert names.split()[:3] == ["stage", "device", "layers"]
    assert [line.split()[0] for line in stages] == ["0", "1"]


def test_json_of_a_strategy_of_the_scripts_own(plan):
    code, printed = plan("--stages=4", "--microbatches=8", "--schedule=1f1b", "--json", kind="own")
    assert code == 0
    found = json.loads(printed.out)
    assert [stage["layers"][0] for stage in found["stages"]] == [
        *("dense", "dense_1", "dense_2", "dense_3"),
    ]
    assert (found["microbatches"], found["schedule"], found["rows"]) == (8, "1f1b", 16)
    assert all(stage["estimate"]["slots"] == 2 * 4 * 272 for stage in found["stages"])


@pytest.mark.parametrize(
    "flags, kind, message",
    [
        (["--stages=5"], "named", "of 4 layer(s) cannot be cut into 5 stages"),
        (["--stages=2"], "ends", "ended without a call of `fit`"),
        (["--stages=2"], "other", "makes the plan of a pipeline"),
    ],
)
def test_no_plan(flags, kind, message, plan):
    code, printed = plan(*flags, kind=kind)
    assert code == 1
    assert message in printed.err
    assert "Received: " in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_a_script_that_fails(plan):
    code, printed = plan("--stages=2", kind="fails")
    assert code == 1
    assert "Traceback" in printed.err
    assert "of the script's own" in printed.err


@pytest.mark.parametrize(
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
