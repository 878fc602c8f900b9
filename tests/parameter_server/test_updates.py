"""Rarer updates under parameter servers, beside what one process computes on the same batches."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_psplus as psp
from keras_psplus import updates
from keras_psplus.cluster.environment import python_path
from tests.all_reduce.test_updates import weights_of, whole_batches
from tests.all_reduce.updates_job import ACCUMULATED, data_of, dense, problem, slices
from tests.parameter_server.test_modes import CLUSTER
from tests.parameter_server.updates_job import CASES, RESUMED

JOB = pathlib.Path(__file__).with_name("updates_job.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What one worker has come to, and the numbers of each case."""
    folder = tmp_path_factory.mktemp("updates")
    environment = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    done = subprocess.run(
        [sys.executable, str(JOB), str(folder)],
        env=environment | ENVIRONMENT | {"PYTHONPATH": python_path(os.environ)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    with np.load(folder / "results.npz") as arrays:
        return dict(arrays), json.loads((folder / "numbers.json").read_text())


def assert_close(got, model, tolerance=2e-6):
    assert len(got) == len(model.get_weights()) > 0
    for weight, expected in zip(got, model.get_weights()):
        np.testing.assert_allclose(weight, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_accumulating_equals_one_process_on_larger_batches(name, job):
    build, policy, by_batch = ACCUMULATED[name]
    keras.utils.set_random_seed(1)
    model = build()
    x, y = data_of(name)
    groups = whole_batches(policy, by_batch)
    for rows in groups:
        model.train_on_batch(x[rows], y[rows])
    if not by_batch:
        model.optimizer.finalize_variable_values(model.trainable_weights)
    results, numbers = job
    got = weights_of(results, f"accumulated {name}")
    assert_close(got, model)
    iterations, sent = numbers[f"accumulated {name}"]
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    assert iterations == int(optimizer.iterations) > 0
    if name != "embedding":
        assert sent == iterations * sum(weight.nbytes for weight in got)


def test_keras_own_accumulation_sends_once_for_each_update(job):
    keras.utils.set_random_seed(1)
    model = dense(keras.optimizers.SGD(0.3, gradient_accumulation_steps=3))
    x, y = problem()
    for rows in slices() * 2:
        model.train_on_batch(x[rows], y[rows])
    results, numbers = job
    assert_close(weights_of(results, "by keras"), model)
    # Eight batches.
    assert numbers["by keras"] == [2 * sum(weight.nbytes for weight in model.get_weights())]


def test_what_waits_is_known_and_can_be_sent(job):
    keras.utils.set_random_seed(1)
    model = dense("sgd")
    x, y = problem()
    for rows in (slice(0, 30), slice(30, 37)):
        model.train_on_batch(x[rows], y[rows])
    results, numbers = job
    assert numbers["finished"] == [{"0": 1}, 1, {}, 2]
    assert_close(weights_of(results, "finished"), model)


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_training_is_as_if_never_interrupted(name, job):
    whole, resumed = (weights_of(job[0], f"{kind} {name}") for kind in ("whole", "resumed"))
    assert len(whole) == len(resumed) > 0
    for weight, expected in zip(resumed, whole):
        np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize(
    "arguments",
    [
        {"updates": updates.DiLoCo(4)},
        {"updates": 4},
        {"mode": "sync", "updates": updates.Accumulate(2)},
        {"max_staleness": 2, "updates": updates.Accumulate(2)},
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused_before_anything_starts(arguments, monkeypatch):
    # In a server, where the constructor would not return.
    monkeypatch.setenv("TF_CONFIG", CLUSTER)
    with pytest.raises(ValueError, match="`updates` .*Received: updates="):
        psp.ParameterServerStrategy(**arguments)
