"""A job that is told to end (SIGTERM) is saved first, and resumes at that very step."""

import json
import pathlib

import keras
import numpy as np
import pytest

from tests.support.jobs import launch
from tests.support.tiers import extended

pytestmark = pytest.mark.processes
JOB = pathlib.Path(__file__).with_name("preemption_job.py")
CLUSTERS = {
    "all_reduce": ["--workers=2"],
    "hybrid": ["--workers=2", "--ps=1", "--nochief"],
    "sync_parameter_server": ["--workers=2", "--ps=1"],
    "pipeline": ["--workers=2", "--chief"],
    "shard_optimizer": ["--workers=2"],
    "shard_all": ["--workers=2"],
    "model_parallel": ["--workers=2"],
    "async_parameter_server": ["--workers=2", "--ps=1"],
}
SAVED = "was told to end (SIGTERM) and has saved the job after batch"


def run(folder, kind, *flags, **options):
    return launch(*CLUSTERS[kind], "--grace=120", *flags, JOB, folder, kind, **options)


@pytest.fixture(scope="module")
def expected():
    """History and weights of one process that is left alone."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dropout(0.0), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(keras.optimizers.Adam(0.05), "mse")
    x = np.random.default_rng(0).normal(size=(48, 8)).astype("float32")
    history = model.fit(x, x.sum(1), batch_size=8, epochs=3, verbose=0, shuffle=False).history
    return {**history, "weights": model.get_weights()}


def check(folder, kind, expected):
    found = json.loads((folder / "result.json").read_text())
    # Whatever their order, each counts once.
    assert (found["steps"], len(found["loss"])) == (18, 3)
    if kind == "async_parameter_server":
        return
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=2e-5, atol=2e-5)
    for own, theirs in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(own, theirs, rtol=1e-6, atol=1e-6)


# Each strategy saves then as after any batch; `test_sizes.py` resumes from that.
@pytest.mark.parametrize(
    "kind", extended("hybrid", "sync_parameter_server", "pipeline", "model_parallel")
)
def test_a_job_whose_launcher_is_told_to_end(kind, expected, tmp_path):
    log = run(tmp_path, kind, exit_code=143)
    assert SAVED in log
    assert "of epoch 2, where it resumes when it is started again. Received: exit code 143" in log
    assert not (tmp_path / "result.json").exists()
    run(tmp_path, kind)
    check(tmp_path, kind, expected)


@pytest.mark.parametrize(
    ("kind", "task", "saves"),
    [
        ("all_reduce", "worker1", "worker-0"),
        *extended(
            ("sync_parameter_server", "ps0", "chief-0"),
            ("hybrid", "ps0", "worker-0"),
        ),
    ],
)
def test_a_job_of_which_one_task_is_told_to_end(kind, task, saves, expected, tmp_path):
    (tmp_path / "told").touch()
    faults = f"preempt:{task}@step=8"
    log = run(tmp_path, kind, "--max_restarts=1", faults=faults, may_show_errors=True)
    assert f"{saves} {SAVED}" in log and "restart 1 of 1 begins" in log
    check(tmp_path, kind, expected)
