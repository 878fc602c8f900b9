"""`--strategy auto`: the best exact entry of a plan, in real clusters and on the command line."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from keras_psplus.catalogue import automatic, lookup
from keras_psplus.cli import main
from keras_psplus.cli.planning import auto
from keras_psplus.cluster import environment
from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.testing import run_in_processes
from keras_psplus.planning import choices
from keras_psplus.planning.choices import Facts
from keras_psplus.planning.cost_model import Cluster

SCRIPT = """
import pathlib
import sys

import keras
import numpy as np

import keras_psplus as psp
from keras_psplus.catalogue import automatic

strategy = psp.strategy_from_env("auto")
keras.utils.set_random_seed(3)
with strategy.scope():
    layers = keras.layers
    embedding = layers.Embedding(60_000, 8, embeddings_initializer="ones")
    model = keras.Sequential(
        [keras.Input((4,), dtype="int32"), embedding, layers.Flatten(),
         layers.Dense(64, activation="tanh"), layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
random = np.random.default_rng(0)
x = random.permutation(60_000)[: 4 * 50].reshape(50, 4).astype("int32")
y = random.normal(size=(50, 1)).astype("float32")
history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
task = getattr(strategy, "task", None)
if task is not None and len(sys.argv) > 2:
    # Workers whose plans have chosen differently find out.
    try:
        automatic._check_all_agree(strategy, f"one of {task.name}")
    except ValueError as error:
        print("refused:", error)
predicted = model.predict(x, verbose=0)
# Rows that no batch looked up are as they were.
weights = {f"weight_{i}": weight for i, weight in enumerate(model.get_weights()) if i}
name = task.name if task else "process"
np.savez(
    pathlib.Path(sys.argv[1], f"{name}.npz"),
    made=type(strategy).__name__, predicted=predicted, loss=history["loss"], **weights,
)
"""
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
FACTS = Facts.from_json(
    {
        "model": "m",
        "batch_rows": 16,
        "rows": 8,
        "step_ms": 3.0,
        "single_ms": 5.0,
        "variables": [{"shape": [3200, 6400], "factor_rows": 8}],
        "tables": [{"rows": 60_000, "dim": 8, "touched": {"1": 32.0, "2": 64.0}}],
    }
)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("auto") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """A plan of a model with much to send, over slow links."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    made = choices.choose(FACTS, automatic.planned(), Cluster(2, 1, 1e8))
    path.write_text(json.dumps(made.as_dict()))
    return path


@pytest.fixture(scope="module")
def one_process(script, tmp_path_factory):
    """What the same script does by itself, where `auto` has nothing to choose."""
    folder = tmp_path_factory.mktemp("one")
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"} | ENVIRONMENT
    done = subprocess.run(
        [sys.executable, script, folder],
        env=environment | {"PYTHONPATH": python_path(os.environ)},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert "keras_psplus: auto: single, as one process trains alone" in done.stderr
    return np.load(folder / "process.npz")


def assert_equal(folder, names, made, expected):
    for name in names:
        found = np.load(folder / f"{name}.npz")
        assert str(found["made"]) == made
        for key in sorted(set(expected) - {"made"}):
            np.testing.assert_allclose(found[key], expected[key], atol=2e-5, err_msg=key)


def test_a_script_is_measured_and_trained_by_two_workers(
    script, one_process, tmp_path, capsys, monkeypatch
):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    flags = ["--workers=2", "--strategy=auto", f"--log_dir={tmp_path}", "--timeout=200"]
    assert main.main(["run", *flags, str(script), str(tmp_path), "disagree"]) == 0
    printed = capsys.readouterr()
    (line,) = re.findall("keras-psplus: auto: .*", printed.out + printed.err)
    assert re.search(
        r"auto: all_reduce(_factors)?, the best exact entry for 2 worker\(s\): [\d.]+ ms predicted "
        r"for a step of 16 rows \(all_reduce(_factors)? [\d.]+, zero [\d.]+, fsdp [\d.]+\)",
        line,
    )
    workers = ["worker-0", "worker-1"]
    assert_equal(tmp_path, workers, "MultiWorkerMirroredStrategy", one_process)
    for worker in workers:
        assert (
            "refused: strategy='auto' has to take the same entry on all workers: give all of them "
            "the same plan. Received: one of worker-0 on worker-0, one of worker-1 on worker-1"
        ) in (tmp_path / f"{worker}.log").read_text()


@pytest.mark.extended
@pytest.mark.processes
def test_a_plan_of_a_file_in_a_cluster_with_servers(script, plan, one_process, tmp_path):
    result = run_in_processes(
        script,
        workers=1,
        chief=True,
        ps=1,
        timeout=560,
        env={**ENVIRONMENT, automatic.PLAN_VARIABLE: str(plan)},
        args=[tmp_path],
    )
    lines = {name: log.count("keras_psplus: auto: ") for name, log in result.logs.items()}
    assert lines == {"chief-0": 1, "worker-0": 0, "ps-0": 0}
    chosen = re.search(r"auto: (\w+), the best exact entry for (.*):", result.logs["chief-0"])
    assert chosen.groups() == ("hybrid", "1 chief + 1 worker(s) + 1 ps")
    assert_equal(tmp_path, ["chief-0", "worker-0"], "HybridStrategy", one_process)


def chosen(capsys, *flags):
    code = main.main(["run", *flags, "--dry_run", str(pathlib.Path(__file__))])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    names = set(re.findall(r"KERAS_PSPLUS_STRATEGY=(\w+)", printed.out))
    assert printed.err.startswith(f"keras-psplus: auto: {min(names)}, ")
    return names


def test_tasks_of_other_hosts_have_the_entry_by_its_name(plan, capsys, monkeypatch):
    auto = ["--strategy=auto", f"--plan={plan}"]
    assert chosen(capsys, *auto, "--workers=2") == {"all_reduce_factors"}
    assert chosen(capsys, *auto, "--hosts=a,b,c") == {"all_reduce_factors"}
    assert chosen(capsys, *auto, "--workers=2", "--ps=1") == {"hybrid"}
    assert chosen(capsys, "--strategy=auto", "--workers=1") == {"single"}
    monkeypatch.setenv(automatic.PLAN_VARIABLE, str(plan))
    assert chosen(capsys, "--strategy=auto") == {"all_reduce_factors"}
    words = ["kubernetes", "--image=i", "--strategy=auto", f"--plan={plan}", "/app/train.py"]
    assert main.main(["export", *words]) == 0
    assert '"exec", "--strategy=all_reduce_factors", "/app' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--strategy=auto", "nothing is known of the script.*Received: --strategy=auto, without"),
        ("--strategy=auto --compression=int8", "auto decides itself.*leave out --compression"),
        ("--strategy=auto --updates=local_sgd:4", "auto decides itself.*leave out --updates"),
        ("--strategy=auto --plan=none.json", "plan cannot be read.*Received: 'none.json'"),
        (f"--strategy=auto --plan={__file__}", "a plan is what `keras-psplus plan --json"),
        ("--strategy=all_reduce --plan=p", "--plan goes with --strategy auto.*=all_reduce"),
        ("--plan=p", "--plan goes with --strategy auto. Received: --strategy=None"),
    ],
)
def test_what_auto_does_not_go_with(flags, message, capsys, monkeypatch):
    monkeypatch.delenv(automatic.PLAN_VARIABLE, raising=False)
    assert main.main(["run", *flags.split(), "--dry_run", __file__]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_what_the_environment_may_not_say_beside_auto(capsys, monkeypatch):
    monkeypatch.setenv("KERAS_PSPLUS_COMPRESSION", "int8")
    assert main.main(["run", "--strategy=auto", "--workers=1", "--dry_run", __file__]) == 2
    assert "Received: --strategy=auto, KERAS_PSPLUS_COMPRESSION=int8" in capsys.readouterr().err
    with pytest.raises(ValueError, match="auto decides itself.*Received: KERAS_PSPLUS_COMPR"):
        lookup.strategy_from_env("auto")


@pytest.mark.parametrize(
    ("layout", "batch_of", "cores", "times"),
    [
        ({"workers": 2, "ps": 0, "chief": False}, 2, 2, 1),
        ({"workers": 4, "ps": 0, "chief": False}, 4, 2, 2),
        ({"workers": 2, "ps": 0, "chief": True}, 3, 4, 1),
        ({"workers": 2, "ps": 1, "chief": True}, 2, 1, 3),
    ],
)
def test_what_tasks_of_one_machine_are_chosen_by(layout, batch_of, cores, times, monkeypatch):
    asked = {}

    def ask(command, **request):
        asked.update(request, command=command)
        work = dataclasses.asdict(FACTS.work)
        facts = dataclasses.asdict(FACTS) | work
        return {key: value for key, value in facts.items() if key != "work"}

    for module in (auto, environment):
        monkeypatch.setattr(module, "available_cores", lambda: cores)
    monkeypatch.setattr(auto.plan_script, "ask", ask)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    chosen = auto.by_measuring(["train.py", "--fast"], layout)
    assert asked["command"] == ["train.py", "--fast"] and asked["workers"] == batch_of
    # The script gets what a task gets, but no cluster.
    threads = max(1, cores // (layout["workers"] + layout["chief"]))
    assert asked["variables"]["OMP_NUM_THREADS"] == str(threads)
    assert "TF_CONFIG" not in asked["variables"]
    # More tasks than cores take longer; links of one machine are as fast as its cores.
    slower = dataclasses.replace(
        FACTS,
        step_ms=times * FACTS.step_ms,
        single_ms=times * FACTS.single_ms,
        int8_ms=times * FACTS.int8_ms,
    )
    link = Cluster(bits_per_second=None)
    assert chosen == automatic.choose_by(slower, link, **layout)


def test_a_script_that_gives_nothing_to_plan_by(tmp_path, capsys):
    path = tmp_path / "empty.py"
    path.write_text("print('no fit')\n")
    assert main.main(["run", "--strategy=auto", str(path)]) == 1
    assert "keras-psplus run: the script has ended without a call of `fit`" in (
        capsys.readouterr().err
    )


def test_without_a_plan_a_cluster_is_refused(monkeypatch):
    monkeypatch.delenv(automatic.PLAN_VARIABLE, raising=False)
    monkeypatch.delenv(lookup.STRATEGY_VARIABLE, raising=False)
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    with pytest.raises(ValueError, match="run --strategy auto.*name that file.*Received: 2 worker"):
        lookup.strategy_from_env("auto")
    with pytest.raises(ValueError, match="cannot be read.*Received: 'none.json'"):
        lookup.strategy_from_env("auto", plan="none.json")
