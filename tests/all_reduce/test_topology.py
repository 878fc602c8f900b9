"""Sums along two hops in four workers, beside one process on the same batches."""

import keras
import numpy as np
import pytest

from tests.all_reduce import topology_cases as cases
from tests.all_reduce import updates_cases
from tests.all_reduce import updates_simulation as simulation
from tests.all_reduce.topology_cases import LOCAL, STEPS, TOPOLOGIES, WORKERS
from tests.support.cluster import reference, run
from tests.support.results import assert_all_close, assert_same, weights_of
from tests.support.tiers import extended

pytestmark = pytest.mark.processes


def check_weights(results, expected=cases.in_one_process):
    found, expected = results.first, reference(expected)
    assert_all_close(weights_of(found), weights_of(expected), 1e-7, 2e-6)


def bytes_of(found, variable, steps):
    """Those of a step: logical, compressed, on the wire, and between groups."""
    numbers = found[f"own bytes {variable}"]
    assert not np.any(numbers % steps)
    return (numbers // steps).tolist()


def check_training(results):
    check_weights(results)
    # A matrix of 10 x 33: two shards in and out inside, one shard there and back between two.
    whole = 4 * 10 * 33
    for found in results.values():
        expected = [whole, whole, 2 * whole // 2 + whole // 2, whole // 2]
        assert bytes_of(found, "first/kernel", 10) == expected
        assert found["how first/kernel"] == "None"


@pytest.mark.extended
def test_training_equals_one_process():
    check_training(run("ar4", cases.exact, topology="pairs"))


@pytest.mark.extended
def test_other_groups_and_several_steps_at_once():
    check_training(run("ar4", cases.exact, topology="turns", steps_per_execution=3))


@pytest.mark.extended
def test_groups_are_made_of_links():
    check_training(run("ar4", cases.automatic, topology="turns"))


@pytest.mark.extended
def test_accumulated_gradients_are_those_of_one_process():
    check_weights(run("ar4", cases.accumulated, topology="pairs"), cases.on_larger_batches)


def displacement(steps):
    before = cases.line().get_weights()
    x, y = cases.batches_of_line(1)
    kernel = x.T @ y / y.size
    return before, [steps * kernel, steps * y.sum(0) / y.size]


@pytest.mark.parametrize("name", ["int8", *extended("powersgd", "both")])
def test_what_a_hop_loses_arrives_later(name):
    results, errors = run("ar4", cases.compressed, name=name, topology="pairs"), []
    for steps in STEPS:
        before, changes = displacement(steps)
        found = weights_of(results.first, str(steps))
        differences = [f - (b - c) for f, b, c in zip(found, before, changes, strict=True)]
        errors.append(max(np.abs(difference).max() for difference in differences))
        assert errors[-1] < 0.9 * max(np.abs(change).max() for change in changes), steps
    # Without feedback, each of the steps would lose as much as the others.
    assert 1e-6 < errors[1] < 0.75 * STEPS[1] / STEPS[0] * errors[0], errors
    if name == "int8":
        # Of 16 x 40 numbers, a byte each and a scale for 16.
        whole, blocks = 4 * 16 * 40, 16 * 40 + 4 * 40
        # It goes in two pieces of 224 numbers, and one of 192: in rows of 56, and of 48.
        between = 2 * 2 * (56 + 4 * 4) + 2 * (48 + 4 * 3)
        for found in results.values():
            expected = [whole, blocks, whole + between, between]
            assert bytes_of(found, "linear/kernel", STEPS[1]) == expected


def simulated(groups):
    keras.utils.set_random_seed(1)
    weights = updates_cases.dense("sgd").get_weights()
    steps = simulation.Simulation(
        *(updates_cases.of(LOCAL), weights, lambda: simulation.SGD(0.1, 0.9), None),
        *([[0, 1, 2, 3]], WORKERS, groups),
    )
    x, y = updates_cases.problem()
    for rows in updates_cases.slices():
        steps.step(x[rows], y[rows])
    steps.finish()
    return steps.weights[0]


def test_groups_step_together_and_are_averaged():
    found = weights_of(run("ar4", cases.local, topology="turns").first)
    groups = [[int(str(worker)[-1]) for worker in group] for group in TOPOLOGIES["turns"]]
    assert_all_close(found, simulated(groups), 1e-5, 5e-6)


@pytest.mark.extended
def test_resumed_training_is_as_if_never_interrupted():
    found = run("ar4", cases.interrupted, topology="turns").first
    assert_same(weights_of(found, "resumed"), weights_of(found, "whole"))


@pytest.mark.extended
def test_devices_of_a_worker_are_a_group():
    results = run("hosts", cases.exact, topology="hosts")
    check_weights(results)
    _, _, whole, between = results.first["own bytes first/kernel"]
    assert whole == 3 * between > 0
    found = weights_of(run("hosts", cases.local, topology="hosts").first)
    assert_all_close(found, simulated([[0, 1], [2, 3]]), 1e-5, 5e-6)
