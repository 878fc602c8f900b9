"""A short look at every strategy: `fit`, `evaluate`, `predict` and `save` equal one process.

`make test-fast` and `make test-versions` run this; the other tests look at each of them closely.
"""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.testing import run_in_processes

JOB = pathlib.Path(__file__).with_name("job.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
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
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    environment |= ENVIRONMENT | {"PYTHONPATH": python_path(os.environ)}
    done = subprocess.run(
        [sys.executable, JOB, folder, "one_process"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return folder


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_equals_one_process(name, folder):
    tasks, processes = STRATEGIES[name]
    run_in_processes(JOB, **tasks, timeout=300, env=ENVIRONMENT, args=[folder, name])
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
