"""A short look at every strategy: `fit`, `evaluate`, `predict` and `save` equal one process.

No job shows a traceback, at its end neither. `make test-versions` runs this, and `make test-fast`
two of them; the other tests look at each closely.
"""

import json
import pathlib

import keras
import numpy as np
import pytest

from tests.support.jobs import run_in_processes, run_script
from tests.support.tiers import extended

JOB = pathlib.Path(__file__).with_name("job.py")
# Tasks of each, and those of them that end with results.
STRATEGIES = {
    "all_reduce": ({"workers": 2}, ["worker-0", "worker-1"]),
    # One worker: asynchronous steps of several have no order.
    "async_parameter_server": ({"chief": True, "workers": 1, "ps": 1}, ["chief-0"]),
    "sync_parameter_server": ({"chief": True, "workers": 2, "ps": 1}, ["chief-0"]),
    "pipeline": ({"chief": True, "workers": 2}, ["chief-0"]),
    "hybrid": ({"workers": 2, "ps": 1}, ["worker-0", "worker-1"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    log = folder / "one_process.jsonl"
    run_script(JOB, folder, "one_process", timeout=560, KERAS_PSPLUS_JSON_LOG=log)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        *("all_reduce", "async_parameter_server"),
        *extended("sync_parameter_server", "pipeline", "hybrid"),
    ],
)
def test_it_equals_one_process(name, folder):
    tasks, processes = STRATEGIES[name]
    env = {"KERAS_PSPLUS_JSON_LOG": str(folder / f"{name}.jsonl")}
    run_in_processes(JOB, folder, name, **tasks, timeout=560, env=env)
    check_log(folder, name, processes)
    expected = np.load(folder / "one_process-process.npz")
    for process in processes:
        found = np.load(folder / f"{name}-{process}.npz")
        assert sorted(found) == sorted(expected)
        for key in expected:
            np.testing.assert_allclose(found[key], expected[key], atol=2e-5, err_msg=key)
    # Plain Keras reads what it has saved.
    weights = keras.models.load_model(folder / f"{name}.keras", compile=False).get_weights()
    for i, weight in enumerate(weights):
        np.testing.assert_allclose(weight, expected[f"weight_{i}"], atol=2e-5)


def check_log(folder, name, processes):
    """All processes that train have said the same of each epoch as one process."""
    ends, steps, times = {}, {}, {}
    for log in ("one_process", name):
        for line in map(json.loads, (folder / f"{log}.jsonl").read_text().splitlines()):
            of = {"epoch_end": ends, "steps": steps, "step_times": times}[line["event"]]
            of.setdefault(line.get("task"), []).append(line)
    expected = ends.pop("process")
    assert [line["step"] for line in expected] == [4, 8]
    assert steps.pop("process")[-1]["bytes_sent"] == 0
    assert sorted(ends) == sorted(steps) == processes
    for process in processes:
        for line, wanted in zip(ends[process], expected, strict=True):
            assert (line["step"], line["epoch"]) == (wanted["step"], wanted["epoch"])
            assert line["logs"] == pytest.approx(wanted["logs"], abs=2e-5)
        assert sum(line["steps"] for line in steps[process]) == 8
        assert all(line["bytes_sent"] > 0 for line in steps[process])
