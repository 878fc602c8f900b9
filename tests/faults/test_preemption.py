"""A job that is told to end (SIGTERM) is saved first, and resumes at that very step."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

JOB = pathlib.Path(__file__).with_name("preemption_job.py")
CLUSTERS = {
    "all_reduce": ["--workers=2"],
    "hybrid": ["--workers=2", "--ps=1", "--nochief"],
    "sync_parameter_server": ["--workers=2", "--ps=1"],
    "pipeline": ["--workers=2", "--chief"],
    "shard_optimizer": ["--workers=2"],
    "shard_all": ["--workers=2"],
    "model_parallel": ["--workers=2"],
}
ASYNCHRONOUS = {"async_parameter_server": ["--workers=2", "--ps=1"]}
GRACE = 120


def run(folder, kind, *flags):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "keras_psplus",
            "run",
            *(CLUSTERS | ASYNCHRONOUS)[kind],
            *flags,
            JOB,
            folder,
            kind,
        ],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def expected():
    """History and weights of one process that is left alone."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dropout(0.0), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(48, 8)).astype("float32")
    history = model.fit(x, x.sum(1), batch_size=8, epochs=3, verbose=0, shuffle=False).history
    return {**history, "weights": model.get_weights()}


def check(folder, expected, has_order=True):
    found = json.loads((folder / "result.json").read_text())
    # Whatever their order, each counts once.
    assert (found["steps"], len(found["loss"])) == (18, 3)
    if not has_order:
        return
    for name in ("loss", "mae"):
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, atol=2e-5)
    for own, theirs in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(own, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", CLUSTERS | ASYNCHRONOUS)
def test_a_job_whose_launcher_is_told_to_end(kind, expected, tmp_path):
    exit_code, log = run(tmp_path, kind, f"--grace={GRACE}")
    assert exit_code == 143, log[-4000:]
    assert "was told to end (SIGTERM) and has saved the job after batch" in log
    assert "of epoch 2, where it resumes when it is started again. Received: exit code 143" in log
    assert not (tmp_path / "result.json").exists()
    exit_code, log = run(tmp_path, kind, f"--grace={GRACE}")
    assert exit_code == 0, log[-4000:]
    check(tmp_path, expected, has_order=kind not in ASYNCHRONOUS)


@pytest.mark.parametrize(
    ("kind", "task", "saves"),
    [
        ("all_reduce", "worker1", "worker-0"),
        ("hybrid", "ps0", "worker-0"),
        ("sync_parameter_server", "ps0", "chief-0"),
        ("pipeline", "worker1", "chief-0"),
    ],
)
def test_a_job_of_which_one_task_is_told_to_end(kind, task, saves, expected, tmp_path):
    (tmp_path / "told").touch()
    flags = [f"--grace={GRACE}", "--max_restarts=1", f"--chaos=preempt:{task}@step=8"]
    exit_code, log = run(tmp_path, kind, *flags)
    assert exit_code == 0, log[-4000:]
    assert f"{saves} was told to end (SIGTERM) and has saved the job after batch" in log
    assert "restart 1 of 1 begins" in log
    check(tmp_path, expected)
