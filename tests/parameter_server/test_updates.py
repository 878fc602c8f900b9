"""Update policies under parameter servers, beside what one process computes on the same batches."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_psplus as psp
from keras_psplus import updates
from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.testing import run_in_processes
from tests.all_reduce.updates_job import (
    dense,
    fit,
    problem,
    slices,
    trained_on_larger_batches,
    weights_of,
)
from tests.parameter_server.accumulation_and_local_sgd_job import RATE
from tests.parameter_server.test_modes import CLUSTER
from tests.parameter_server.updates_job import (
    ACCUMULATED,
    LOCAL,
    RESUMED,
    embedding_accumulated_by_keras,
    everything,
)
from tests.parameter_server.waiting import cluster_that_goes_on, wait_for
from tests.selection import cases, of_kind

JOB = pathlib.Path(__file__).with_name("updates_job.py")
REAL_JOB = pathlib.Path(__file__).with_name("accumulation_and_local_sgd_job.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    """What one worker has come to, and the numbers of each case."""
    folder = tmp_path_factory.mktemp("updates")
    environment = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    done = subprocess.run(
        [sys.executable, str(JOB), str(folder), *cases(request)],
        env=environment | ENVIRONMENT | {"PYTHONPATH": python_path(os.environ)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    with np.load(folder / "results.npz") as arrays:
        return dict(arrays), json.loads((folder / "numbers.json").read_text())


def assert_close(got, model, tolerance=2e-6):
    assert len(got) == len(model.get_weights()) > 0
    for weight, expected in zip(got, model.get_weights()):
        np.testing.assert_allclose(weight, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", of_kind("accumulated", ACCUMULATED))
def test_accumulating_equals_one_process_on_larger_batches(name, job):
    model, _ = trained_on_larger_batches(name)
    results, numbers = job
    got = weights_of(results, f"accumulated {name}")
    assert_close(got, model)
    iterations, sent = numbers[f"accumulated {name}"]
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    assert iterations == int(optimizer.iterations) > 0
    if name not in ("embedding", "places"):
        assert sent == iterations * sum(weight.nbytes for weight in got)


@pytest.mark.cases("by keras")
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


@pytest.mark.cases("by keras")
def test_rows_that_keras_accumulates_are_summed(job):
    model = embedding_accumulated_by_keras()
    fit(model, epochs=2)
    assert_close(weights_of(job[0], "rows by keras"), model)


@pytest.mark.cases("finished")
def test_what_waits_is_known_and_can_be_sent(job):
    keras.utils.set_random_seed(1)
    model = dense("sgd")
    x, y = problem()
    for rows in (slice(0, 30), slice(30, 37)):
        model.train_on_batch(x[rows], y[rows])
    results, numbers = job
    assert numbers["finished"] == [{"0": 1}, 1, {}, 2]
    assert_close(weights_of(results, "finished"), model)


@pytest.mark.parametrize("name", of_kind("local", LOCAL))
def test_steps_alone_of_one_worker_come_to_the_same(name, job):
    _, build = LOCAL[name]
    keras.utils.set_random_seed(1)
    model = build()
    fit(model)
    results, numbers = job
    got = weights_of(results, f"local {name}")
    for value, expected in zip(got, everything(model), strict=True):
        np.testing.assert_allclose(value, expected, rtol=2e-6, atol=2e-6)
    size = sum(weight.nbytes for weight in model.get_weights())
    # Epochs of four batches. Momenta, and moving averages of weights, are sent as well.
    rounds = {"post-local": 2 * (6 + 1 + 2), "embedding": 2 * 6, "loss_scale": 6}
    assert numbers[f"local {name}"] == rounds[name] * size


@pytest.mark.cases("looked at")
def test_who_evaluates_sees_the_steps_that_were_taken_alone(job):
    keras.utils.set_random_seed(1)
    model = dense("sgd")
    x, y = problem()
    for rows in slices()[:2]:
        model.train_on_batch(x[rows], y[rows])
    assert_close(weights_of(job[0], "looked at"), model)


@pytest.mark.cases("refused")
def test_an_optimizer_that_cannot_be_copied_is_refused(job):
    message = job[1]["refused"]
    assert "an attribute of the model" in message
    assert "Received: " in message


@pytest.mark.parametrize("name", of_kind("resumed", RESUMED))
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
        {"mode": "sync", "backup_workers": 1, "updates": updates.LocalSGD(2)},
    ],
    ids=["diloco", "no_updates", "sync", "staleness", "backup_workers"],
)
def test_what_has_no_meaning_is_refused_before_anything_starts(arguments, monkeypatch):
    # In a server, where the constructor would not return.
    monkeypatch.setenv("TF_CONFIG", CLUSTER)
    with pytest.raises(ValueError, match="`updates` .*Received: updates="):
        psp.ParameterServerStrategy(**arguments)


def result_of(log):
    (line,) = [line for line in log.splitlines() if line.startswith("result ")]
    return json.loads(line.removeprefix("result "))


def test_a_killed_worker_loses_what_it_has_summed_and_no_more(tmp_path):
    command = [sys.executable, str(REAL_JOB), "accumulate"]
    with cluster_that_goes_on(command, ENVIRONMENT, tmp_path) as cluster:
        chief = cluster.log_path("chief-0")
        wait_for(chief, "batch 40.", seconds=120)
        os.kill(cluster.pids["worker-1"], signal.SIGKILL)
        wait_for(chief, "\nresult {", seconds=90)
    log = chief.read_text()
    found = result_of(log)
    # Of 30 batches, each worker has updated with every four, and with the rest at the epoch's end.
    assert 16 <= found["first"] <= 18
    assert found["first_traffic"] == {"gradient": 4000 * found["first"], "pull": 4000 * 60}
    lost = re.search(r"worker-1 was lost with the gradients of (\d+) batch\(es\)", log)
    assert lost, log[-4000:]
    assert int(lost[1]) > 0
    # Every batch is with one of them.
    assert found["pending"] == {"0": 120 - int(lost[1])}
    assert (found["before"], found["finished"], found["after"]) == ([0.0], 1, [-RATE])


def test_two_workers_add_up_what_they_have_changed(tmp_path):
    result = run_in_processes(
        REAL_JOB, workers=2, ps=1, chief=True, timeout=560, env=ENVIRONMENT, args=["local"]
    )
    found = result_of(result.logs["chief-0"])
    # Each step counts once, and its change by half; callbacks see all of it at an epoch's end.
    assert found["iterations"] == 84
    assert found["seen"] == [-RATE * 42 / 2, -RATE * 84 / 2]
    # Of 42 steps, each worker begins a round with every five.
    rounds = found["traffic"]["gradient"] / 4000
    assert 2 * 9 <= rounds <= 2 * 10
    # Each round reads once, and so may a worker that comes late to its first copies.
    extra = found["traffic"]["pull"] - found["traffic"]["gradient"]
    assert 0 <= extra <= 2 * 4000
