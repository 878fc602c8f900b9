"""Update policies on two workers, beside what one process computes on the same batches."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_psplus import updates
from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.testing import run_in_processes
from tests import references
from tests.all_reduce import updates_simulation as simulation
from tests.all_reduce.updates_job import (
    ACCUMULATED,
    ALONE,
    CASES,
    EPOCHS,
    LOCAL,
    RESUMED,
    data_of,
    dense,
    problem,
    slices,
)
from tests.selection import cases, of_kind

JOB = pathlib.Path(__file__).with_name("updates_job.py")
WORKERS = 2
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


# Of small runs of DiLoCo, to notice what every other test might take for granted.
GOLDEN = {
    "diloco": [1.052823, 1.133299, 1.016032],
    "fragments": [1.071741, 1.070355, 0.936446],
}


@pytest.fixture(scope="module")
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("updates")
    logs = run_in_processes(
        JOB,
        workers=WORKERS,
        timeout=560,
        env=ENVIRONMENT,
        args=["--out", folder, *cases(request)],
    ).logs
    return [load(folder, i, logs[f"worker-{i}"]) for i in range(WORKERS)]


def load(folder, worker, log):
    path = pathlib.Path(folder, f"worker-{worker}.json")
    assert path.exists(), log[-8000:]
    with np.load(folder / f"worker-{worker}.npz") as arrays:
        return dict(arrays), json.loads(path.read_text())


@pytest.fixture(scope="module")
def alone(request, tmp_path_factory):
    """Results of a process without a cluster, of one device and of two."""
    results = {}
    chosen = cases(request, argument="devices")
    for devices in [number for number in ALONE if number in chosen]:
        folder = tmp_path_factory.mktemp("alone")
        environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
        environment |= ENVIRONMENT | {"PYTHONPATH": python_path(os.environ)}
        done = subprocess.run(
            [sys.executable, JOB, "--out", folder, "--devices", str(devices)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=560,
        )
        results[devices] = load(folder, 0, done.stdout)
    return results


def whole_batches(policy, by_batch):
    """The rows of each update."""
    groups, waiting = [], []
    for _ in range(EPOCHS):
        for rows in slices():
            waiting += [rows]
            if len(waiting) == policy.steps:
                groups, waiting = [*groups, waiting], []
        if policy.flush and waiting:
            groups, waiting = [*groups, waiting], []
    if by_batch and waiting:
        groups += [waiting]
    return [np.concatenate([np.arange(r.start, r.stop) for r in group]) for group in groups]


def weights_of(results, name):
    keys = [key for key in results if key.rpartition("/")[0] == name]
    return [results[key] for key in sorted(keys, key=lambda key: int(key.rpartition("/")[2]))]


def trained_on_larger_batches(name):
    """The model of a case, trained in one process, and the number of its updates."""
    build, policy, by_batch = ACCUMULATED[name]
    keras.utils.set_random_seed(1)
    model = build()
    x, y = data_of(name)
    groups = whole_batches(policy, by_batch)
    with references.built_first():
        for rows in groups:
            model.train_on_batch(x[rows], y[rows])
    if not by_batch:
        model.optimizer.finalize_variable_values(model.trainable_weights)
    return model, len(groups)


@pytest.mark.parametrize("name", of_kind("accumulated", ACCUMULATED))
def test_accumulating_equals_one_process_on_larger_batches(name, run):
    model, number = trained_on_larger_batches(name)
    results, numbers = run[0]
    got = weights_of(results, f"accumulated {name}")
    assert len(got) == len(model.get_weights()) > 0
    for weight, expected in zip(got, model.get_weights()):
        np.testing.assert_allclose(weight, expected, rtol=1e-6, atol=1e-6)
    iterations, sent = numbers[f"accumulated {name}"]
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    assert iterations == int(optimizer.iterations) > 0
    if "loss_scale" not in name:
        assert iterations == number
    if name not in ("embedding", "places"):
        assert sent == iterations * sum(weight.nbytes for weight in got)


INNER = {
    "sgd": lambda: simulation.SGD(0.3),
    "momentum": lambda: simulation.SGD(0.1, 0.9),
    "ema": lambda: simulation.SGD(0.3, ema=0.8),
}


def first_weights():
    keras.utils.set_random_seed(1)
    return dense("sgd").get_weights()


def simulated(name, workers):
    policy, optimizer = LOCAL[name]
    outer = None
    if name == "outer adam":
        outer = functools.partial(simulation.Adam, 0.05)
    elif isinstance(policy, updates.DiLoCo):
        outer = functools.partial(simulation.SGD, 0.7, 0.9, nesterov=True)
    # By size: the first kernel balances all others.
    fragments = [[0], [2, 1, 3]] if policy.fragments == 2 else [[0, 1, 2, 3]]
    steps = simulation.Simulation(
        policy, first_weights(), INNER[optimizer], outer, fragments, workers
    )
    x, y = problem()
    for _ in range(EPOCHS):
        for rows in slices():
            steps.step(x[rows], y[rows])
        steps.finish()
    return steps.inner[0].average or steps.weights[0]


@pytest.mark.parametrize("name", of_kind("local", LOCAL))
def test_workers_that_step_alone_compute_what_the_papers_say(name, run):
    expected = simulated(name, WORKERS)
    for weight, one in zip(weights_of(run[0][0], f"local {name}"), expected, strict=True):
        np.testing.assert_allclose(weight, one, rtol=1e-5, atol=5e-6)


@pytest.mark.cases("accumulated optimizers")
@pytest.mark.parametrize("devices", [1, 2])
def test_a_process_without_a_cluster_does_the_same(devices, alone, run):
    results, numbers = alone[devices]
    expected = weights_of(run[0][0], "accumulated optimizers")
    for weight, one in zip(weights_of(results, "accumulated optimizers"), expected, strict=True):
        np.testing.assert_allclose(weight, one, rtol=1e-6, atol=1e-6)
    name = ALONE[devices]
    expected = simulated(name, devices)
    for weight, one in zip(weights_of(results, f"local {name}"), expected, strict=True):
        np.testing.assert_allclose(weight, one, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("name", of_kind("local", GOLDEN))
def test_losses_of_diloco_are_as_recorded(name, run):
    losses = run[0][1][f"losses of local {name}"]
    np.testing.assert_allclose(losses, GOLDEN[name], rtol=1e-4)


@pytest.mark.cases(*(f"local {name}" for name in ("every step", "diloco", "slots", "post-local")))
@pytest.mark.cases("resumed diloco")
def test_changes_are_sent_once_in_a_round_and_compressed(run):
    numbers = run[0][1]
    whole = sum(weight.nbytes for weight in weights_of(run[0][0], "local every step"))
    batches = len(slices())
    # In each epoch of four batches: after each; twice, the second time as it ends.
    assert numbers["local every step"] == [EPOCHS * batches, EPOCHS * batches * whole]
    assert numbers["local diloco"] == [EPOCHS * batches, EPOCHS * 2 * whole]
    # Momenta as well.
    assert numbers["local slots"] == [EPOCHS * batches, EPOCHS * 2 * 2 * whole]
    # Six gradients, then the rest of an epoch and another epoch, with moving averages as well.
    assert numbers["local post-local"] == [EPOCHS * batches, (6 + 2 * (1 + 2)) * whole]
    logical, compressed = numbers["whole diloco"]
    assert compressed < logical / 2


@pytest.mark.cases("meetings")
def test_workers_that_look_at_their_weights_together_see_the_same(run):
    (first, _), (second, _) = run
    for i in range(4):
        ours, theirs = first[f"apart/{i}"], second[f"apart/{i}"]
        assert not np.array_equal(ours, theirs)
        np.testing.assert_allclose(first[f"together/{i}"], (ours + theirs) / 2, atol=1e-6)


@pytest.mark.cases("local every step")
def test_averaging_at_every_step_is_synchronous_training(run):
    weights, optimizer = first_weights(), simulation.SGD(0.3)
    x, y = problem()
    for _ in range(EPOCHS):
        for rows in slices():
            optimizer.step(weights, simulation.gradients(weights, x[rows], y[rows]))
    for weight, one in zip(weights_of(run[0][0], "local every step"), weights, strict=True):
        np.testing.assert_allclose(weight, one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", of_kind("resumed", RESUMED))
def test_resumed_training_is_as_if_never_interrupted(name, run):
    for worker, _ in run:
        whole, resumed = (weights_of(worker, f"{kind} {name}") for kind in ("whole", "resumed"))
        assert len(whole) == len(resumed) > 0
        for weight, expected in zip(resumed, whole):
            np.testing.assert_array_equal(weight, expected)


@pytest.mark.cases("by_hand")
def test_training_goes_on_from_a_state_of_the_scripts_own(run):
    for worker, _ in run:
        whole, resumed = (weights_of(worker, f"{kind} by hand") for kind in ("whole", "resumed"))
        for weight, expected in zip(resumed, whole, strict=True):
            np.testing.assert_array_equal(weight, expected)


@pytest.mark.cases("parts")
@pytest.mark.cases(*CASES, others=True)
def test_workers_end_with_the_same_bits(run):
    (first, numbers), (second, other_numbers) = run
    # Rows of embeddings are as many as each worker has.
    own = {"accumulated embedding", "accumulated places", "whole accumulate", "resumed accumulate"}
    assert {k for k in numbers if numbers[k] != other_numbers[k]} <= own
    assert set(first) == set(second)
    # Of optimizers that are no attributes of the model.
    assert any(key.startswith("parts/") for key in first)
    for key, value in first.items():
        if key.startswith("apart/"):
            continue
        np.testing.assert_array_equal(value, second[key], err_msg=key)
