"""An evaluator beside a cluster: what it finds, when it ends, and what becomes of it."""

import json
import os
import pathlib
import threading

import keras
import numpy as np
import pytest

import keras_psplus as psp
from keras_psplus.cli import main
from keras_psplus.cluster import serving
from keras_psplus.cluster.config import ClusterConfigError, TaskConfig
from tests.callbacks.test_communication_monitor import scalars
from tests.support.jobs import launch

JOB = pathlib.Path(__file__).with_name("job.py")
STEPS = 4


@pytest.fixture
def role(monkeypatch):
    """Makes this process an evaluator."""
    cluster = {"chief": ("h:1",), "worker": ("h:2",), "ps": ("h:3",)}
    monkeypatch.setenv("TF_CONFIG", TaskConfig(cluster, "evaluator", 0).to_tf_config())


def dense():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


@pytest.mark.processes
def test_it_evaluates_what_the_cluster_trains(tmp_path):
    log = tmp_path / "log.jsonl"
    flags = ["--workers=2", "--evaluator", "--max_restarts=1", f"--log_dir={tmp_path}/logs"]
    launch(*flags, f"--json_log={log}", JOB, tmp_path, faults="kill:evaluator0@step=2")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    ends = [(line["event"], line["task"]) for line in lines if line["event"].startswith("task_")]
    assert ends.index(("task_ended", "evaluator-0")) < ends.index(("task_restarted", "evaluator-0"))
    # The job itself was not started again.
    assert [event for event, task in ends if task == "worker-0"] == ["task_started", "task_ended"]

    history = json.loads((tmp_path / "history.json").read_text())
    found = {}
    for line in lines:
        if line["event"] == "evaluation":
            assert line["task"] == "evaluator-0"
            found.setdefault(line["checkpoint"], []).append((line["step"], line["logs"]))
    for epoch in range(1, 4):
        ((step, results),) = found.pop(f"{epoch}.weights.h5")
        assert step == STEPS * epoch
        for name in ("loss", "mae"):
            assert results[name] == pytest.approx(history[f"val_{name}"][epoch - 1], rel=1e-5)
    # Written at each epoch to the same path: at least the last one was seen.
    (evaluations,) = found.values()
    assert evaluations[-1] == (STEPS * 3, results)
    board = scalars(tmp_path / "board" / "validation")
    by_step = dict(board["evaluation_mae_vs_iterations"])
    expected = {STEPS * (i + 1): value for i, value in enumerate(history["val_mae"])}
    assert by_step == pytest.approx(expected, rel=1e-5)


def test_files_that_are_not_complete_wait(tmp_path):
    model, trained = dense(), dense()
    x, y = np.ones((4, 2), "float32"), np.zeros((4, 1), "float32")
    evaluated = []
    note = keras.callbacks.LambdaCallback()
    note.on_test_end = lambda logs=None: evaluated.append(dict(logs))

    def write():
        """In place of the time between two looks: another process goes on to write."""
        data = whole.read_bytes()
        parts = [data[:100], data]
        while True:
            (tmp_path / "2.weights.h5").write_bytes(parts.pop(0) if parts else data)
            yield

    trained.save_weights(tmp_path / "1.weights.h5")
    trained.set_weights([np.full((2, 1), 3.0), np.zeros(1)])
    whole = tmp_path / "whole.h5"
    whole.write_bytes(b"")
    trained.save_weights(tmp_path / "temporary.weights.h5")
    whole.write_bytes((tmp_path / "temporary.weights.h5").read_bytes())
    (tmp_path / "temporary.weights.h5").unlink()
    (tmp_path / "0.weights.h5").write_bytes(b"no checkpoint")
    writes = write()

    evaluator = psp.SidecarEvaluator(
        model, (x, y), tmp_path, max_evaluations=2, callbacks=[note], poll_seconds=0.01
    )
    look, looks = evaluator._look, []

    def look_while_writing():
        looks.append(1)
        if len(looks) <= 3:
            next(writes)
        return look()

    evaluator._look = look_while_writing
    evaluator.start()
    assert len(evaluated) == 2
    assert evaluated[1]["loss"] == pytest.approx(36.0)


def test_it_notices_the_end_of_the_chief_by_itself(role, tmp_path, monkeypatch):
    has_ended, evaluated, model = threading.Event(), [], dense()
    monkeypatch.setattr(serving, "wait_for_end_of_chief", lambda task: has_ended.wait(60))
    model.save_weights(tmp_path / "1.weights.h5")

    def note(logs):
        evaluated.append(logs)
        # What is there when the chief has ended is the last.
        model.save_weights(tmp_path / "2.weights.h5")
        has_ended.set()

    noting = keras.callbacks.LambdaCallback()
    noting.on_test_end = note
    data = np.ones((4, 2), "float32"), np.zeros((4, 1), "float32")
    psp.SidecarEvaluator(model, data, tmp_path, callbacks=[noting], poll_seconds=0.1).start()
    assert len(evaluated) == 2


def test_an_evaluator_trains_nothing(role):
    assert psp.task_type() == "evaluator"
    with psp.strategy_from_env().scope():
        model = dense()
    x, y = np.ones((4, 2), "float32"), np.zeros((4, 1), "float32")
    for train in (model.fit, model.train_on_batch):
        with pytest.raises(RuntimeError, match="an evaluator, and trains nothing.* Received: "):
            train(x, y)
    assert model.evaluate(x, y, verbose=0)[0] >= 0
    with psp.single_process():
        model.fit(x, y, verbose=0)
    for make in (psp.ParameterServerStrategy, psp.PipelineStrategy, psp.HybridStrategy):
        with pytest.raises(ClusterConfigError, match="no part in .*keras_psplus.strategy"):
            make()


def test_arguments(tmp_path):
    data = np.ones((4, 2)), np.ones((4, 1))
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile("sgd", "mse")
    not_compiled = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    for model in (unbuilt, not_compiled, None):
        with pytest.raises(ValueError, match="compiled Keras model.* Received: model="):
            psp.SidecarEvaluator(model, data, tmp_path)
    for wrong in ({"steps": 0}, {"max_evaluations": 0}, {"poll_seconds": 0}):
        with pytest.raises(ValueError, match=f"Received: {next(iter(wrong))}="):
            psp.SidecarEvaluator(dense(), data, tmp_path, **wrong)
    for path in (None, "", 3):
        with pytest.raises(ValueError, match="Received: checkpoint_dir="):
            psp.SidecarEvaluator(dense(), data, path)


def test_dry_run_has_an_evaluator(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    script = tmp_path / "train.py"
    script.write_text("")
    assert main.main(["run", "--dry_run", "--hosts=a,b", "--evaluator", str(script)]) == 0
    out = capsys.readouterr().out
    assert "# evaluator-0 on any host" in out and '"type": "evaluator"' in out
    assert os.path.getsize(script) == 0
