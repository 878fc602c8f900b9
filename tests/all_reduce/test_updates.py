"""Rarer updates on two workers, beside what one process computes on the same batches."""

import functools
import json
import pathlib

import keras
import numpy as np
import pytest

from keras_psplus import updates
from keras_psplus.cluster.testing import run_in_processes
from tests.all_reduce import updates_simulation as simulation
from tests.all_reduce.updates_job import (
    ACCUMULATED,
    EPOCHS,
    LOCAL,
    RESUMED,
    data_of,
    dense,
    problem,
    slices,
)

JOB = pathlib.Path(__file__).with_name("updates_job.py")
WORKERS = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("updates")
    logs = run_in_processes(
        JOB,
        workers=WORKERS,
        timeout=280,
        env={"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
        args=["--out", folder],
    ).logs
    results = []
    for i in range(WORKERS):
        path = pathlib.Path(folder, f"worker-{i}.json")
        assert path.exists(), logs[f"worker-{i}"][-8000:]
        with np.load(folder / f"worker-{i}.npz") as arrays:
            results.append((dict(arrays), json.loads(path.read_text())))
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


@pytest.mark.parametrize("name", ACCUMULATED)
def test_accumulating_equals_one_process_on_larger_batches(name, run):
    build, policy, by_batch = ACCUMULATED[name]
    keras.utils.set_random_seed(1)
    model = build()
    x, y = data_of(name)
    groups = whole_batches(policy, by_batch)
    for rows in groups:
        model.train_on_batch(x[rows], y[rows])
    if not by_batch:
        model.optimizer.finalize_variable_values(model.trainable_weights)
    results, numbers = run[0]
    got = weights_of(results, f"accumulated {name}")
    assert len(got) == len(model.get_weights()) > 0
    for weight, expected in zip(got, model.get_weights()):
        np.testing.assert_allclose(weight, expected, rtol=1e-6, atol=1e-6)
    iterations, sent = numbers[f"accumulated {name}"]
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    assert iterations == int(optimizer.iterations) > 0
    if "loss_scale" not in name:
        assert iterations == len(groups)
    if name != "embedding":
        assert sent == iterations * sum(weight.nbytes for weight in got)


INNER = {
    "sgd": lambda: simulation.SGD(0.3),
    "momentum": lambda: simulation.SGD(0.1, 0.9),
    "ema": lambda: simulation.SGD(0.3, ema=0.8),
}


def first_weights():
    keras.utils.set_random_seed(1)
    return dense("sgd").get_weights()


@pytest.mark.parametrize("name", LOCAL)
def test_workers_that_step_alone_compute_what_the_papers_say(name, run):
    policy, optimizer = LOCAL[name]
    outer = None
    if name == "outer adam":
        outer = functools.partial(simulation.Adam, 0.05)
    elif isinstance(policy, updates.DiLoCo):
        outer = functools.partial(simulation.SGD, 0.7, 0.9, nesterov=True)
    # By size: the first kernel balances all others.
    fragments = [[0], [2, 1, 3]] if policy.fragments == 2 else [[0, 1, 2, 3]]
    simulated = simulation.Simulation(policy, first_weights(), INNER[optimizer], outer, fragments)
    x, y = problem()
    for _ in range(EPOCHS):
        for rows in slices():
            simulated.step(x[rows], y[rows])
        simulated.finish()
    expected = simulated.inner[0].average or simulated.weights[0]
    for weight, one in zip(weights_of(run[0][0], f"local {name}"), expected, strict=True):
        np.testing.assert_allclose(weight, one, rtol=1e-5, atol=5e-6)


def test_averaging_at_every_step_is_synchronous_training(run):
    weights, optimizer = first_weights(), simulation.SGD(0.3)
    x, y = problem()
    for _ in range(EPOCHS):
        for rows in slices():
            optimizer.step(weights, simulation.gradients(weights, x[rows], y[rows]))
    for weight, one in zip(weights_of(run[0][0], "local every step"), weights, strict=True):
        np.testing.assert_allclose(weight, one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_training_is_as_if_never_interrupted(name, run):
    for worker, _ in run:
        whole, resumed = (weights_of(worker, f"{kind} {name}") for kind in ("whole", "resumed"))
        assert len(whole) == len(resumed) > 0
        for weight, expected in zip(resumed, whole):
            np.testing.assert_array_equal(weight, expected)


def test_workers_end_with_the_same_bits(run):
    (first, numbers), (second, other_numbers) = run
    # Rows of embeddings are as many as each worker has.
    assert {k for k in numbers if numbers[k] != other_numbers[k]} <= {"accumulated embedding"}
    assert set(first) == set(second)
    for key, value in first.items():
        np.testing.assert_array_equal(value, second[key], err_msg=key)
