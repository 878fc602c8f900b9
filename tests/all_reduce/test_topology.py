"""Sums along two hops in four workers, beside one process on the same batches."""

import json
import pathlib

import keras
import numpy as np
import pytest

from keras_psplus.cluster.testing import run_in_processes
from tests import references
from tests.all_reduce import updates_job
from tests.all_reduce import updates_simulation as simulation
from tests.all_reduce.topology_job import (
    BATCH,
    CASES,
    COMPRESSIONS,
    HOST_CASES,
    LOCAL,
    STEPS,
    TOPOLOGIES,
    WORKERS,
    batches_of_line,
    everything,
    line,
    problem,
)
from tests.selection import cases

JOB = pathlib.Path(__file__).with_name("topology_job.py")


@pytest.fixture(scope="module")
def run(request, tmp_path_factory):
    return results_of(WORKERS, tmp_path_factory.mktemp("topology"), *cases(request))


@pytest.fixture(scope="module")
def run_of_hosts(tmp_path_factory):
    """Two workers of two devices each."""
    folder = tmp_path_factory.mktemp("hosts")
    return results_of(2, folder, "--devices", "2", *HOST_CASES)


def results_of(workers, folder, *args):
    logs = run_in_processes(
        JOB,
        workers=workers,
        timeout=560,
        env={"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
        args=["--out", folder, *args],
    ).logs
    results = []
    for i in range(workers):
        path = pathlib.Path(folder, f"worker-{i}.json")
        assert path.exists(), logs[f"worker-{i}"][-8000:]
        with np.load(folder / f"worker-{i}.npz") as arrays:
            results.append((dict(arrays), json.loads(path.read_text())))
    return results


def weights_of(arrays, key):
    return [arrays[f"{key}/{i}"] for i in range(sum(k.startswith(f"{key}/") for k in arrays))]


def of(kinds):
    chosen = [case for case in CASES if case.split()[0] in kinds]
    return [pytest.param(*case.split(), marks=pytest.mark.cases(case)) for case in chosen]


@pytest.fixture(scope="module")
def alone():
    """The weights of one process, for each number of batches in an update."""
    ids, y = problem()
    model = everything()
    with references.built_first():
        model.fit(ids, y, BATCH, epochs=2, shuffle=False, verbose=0)
    weights = {1: model.get_weights()}
    model = everything()
    # The last batch of five waits for another.
    for rows in (slice(0, 2 * BATCH), slice(2 * BATCH, 4 * BATCH)):
        model.train_on_batch(ids[rows], y[rows])
    return weights | {2: model.get_weights()}


@pytest.mark.parametrize("kind, name", of(["exact", "loops", "auto"]))
def test_training_equals_one_process(kind, name, run, alone):
    found = weights_of(run[0][0], f"{kind} {name}")
    for weight, expected in zip(found, alone[1], strict=True):
        np.testing.assert_allclose(weight, expected, atol=2e-6)


@pytest.mark.parametrize("kind, name", of(["accumulated"]))
def test_accumulated_gradients_are_those_of_one_process(kind, name, run, alone):
    found = weights_of(run[0][0], f"{kind} {name}")
    for weight, expected in zip(found, alone[2], strict=True):
        np.testing.assert_allclose(weight, expected, atol=2e-6)


def test_devices_of_a_worker_are_a_group(run_of_hosts, alone):
    (first, traffic), (second, _) = run_of_hosts
    for key, value in first.items():
        assert second[key].tobytes() == value.tobytes(), key
    for weight, expected in zip(weights_of(first, "exact hosts"), alone[1], strict=True):
        np.testing.assert_allclose(weight, expected, atol=2e-6)
    expected = simulated("local_sgd", "hosts")
    for weight, one in zip(weights_of(first, "local_sgd hosts"), expected, strict=True):
        np.testing.assert_allclose(weight, one, rtol=1e-5, atol=5e-6)
    *_, whole, between = traffic["exact hosts"]["first/kernel"]
    assert whole == 3 * between > 0


@pytest.mark.cases(*CASES, others=True)
def test_workers_end_with_the_same_bits(run):
    first = run[0][0]
    assert first
    for arrays, _ in run[1:]:
        assert set(arrays) == set(first)
        for key, value in first.items():
            assert arrays[key].tobytes() == value.tobytes(), key


def displacement(steps):
    before = line().get_weights()
    x, y = batches_of_line(1)
    kernel = x.T @ y / y.size
    return before, [steps * kernel, steps * y.sum(0) / y.size]


@pytest.mark.parametrize("kind, name", of(COMPRESSIONS))
def test_what_a_hop_loses_arrives_later(kind, name, run):
    errors = []
    for steps in STEPS:
        before, changes = displacement(steps)
        found = weights_of(run[0][0], f"{kind} {name} {steps}")
        differences = [f - (b - c) for f, b, c in zip(found, before, changes, strict=True)]
        errors.append(max(np.abs(difference).max() for difference in differences))
        assert errors[-1] < 0.9 * max(np.abs(change).max() for change in changes), steps
    # Without feedback, each of the steps would lose as much as the others.
    assert 1e-6 < errors[1] < 0.75 * STEPS[1] / STEPS[0] * errors[0], errors


def simulated(policy, name):
    keras.utils.set_random_seed(1)
    weights = updates_job.dense("sgd").get_weights()
    outer = None
    if policy == "diloco":
        outer = lambda: simulation.SGD(0.7, 0.9, nesterov=True)  # noqa: E731
    groups = [[int(str(worker)[-1]) for worker in group] for group in TOPOLOGIES[name]]
    if name == "hosts":
        groups = [[0, 1], [2, 3]]
    steps = simulation.Simulation(
        LOCAL[policy], weights, lambda: simulation.SGD(0.1, 0.9), outer, [[0, 1, 2, 3]], 4, groups
    )
    x, y = updates_job.problem()
    for rows in updates_job.slices():
        steps.step(x[rows], y[rows])
    steps.finish()
    return steps.weights[0]


@pytest.mark.parametrize("policy, name", of(LOCAL))
def test_groups_step_together_and_are_averaged(policy, name, run):
    found = weights_of(run[0][0], f"{policy} {name}")
    for weight, one in zip(found, simulated(policy, name), strict=True):
        np.testing.assert_allclose(weight, one, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("kind, name", of(["resumed"]))
def test_resumed_training_is_as_if_never_interrupted(kind, name, run):
    for arrays, _ in run:
        whole, again = (weights_of(arrays, f"{key}{kind} {name}") for key in ("whole ", ""))
        assert len(whole) == len(again) > 0
        for weight, expected in zip(again, whole):
            np.testing.assert_array_equal(weight, expected)


@pytest.mark.cases("exact pairs", "auto three", "int8 pairs")
def test_bytes_are_those_of_each_hop(run):
    def traffic(worker, key, variable, steps):
        compressor, *numbers = run[worker][1][key][variable]
        assert all(number % steps == 0 for number in numbers)
        return compressor, *(number // steps for number in numbers)

    for worker in range(WORKERS):
        # A matrix of 10 x 33: two shards in and out inside, one shard there and back between two.
        whole = 4 * 10 * 33
        found = traffic(worker, "exact pairs", "first/kernel", 10)
        assert found == (None, whole, whole, 2 * whole // 2 + whole // 2, whole // 2)
        ring = round(2 * 2 * whole / 3)
        up_and_down = (2 * ring, 0) if worker in (1, 2) else (2 * ring + whole, whole)
        expected = (None, whole, whole, *((whole, whole) if worker == 3 else up_and_down))
        assert traffic(worker, "auto three", "first/kernel", 10) == expected
        # Of 16 x 40 numbers, a byte each and a scale for 16; all of them between leaders.
        whole, blocks = 4 * 16 * 40, 16 * 40 + 4 * 40
        _, *numbers = traffic(worker, "int8 pairs", "linear/kernel", STEPS[1])
        # It goes in two pieces of 224 numbers, and one of 192: in rows of 56, and of 48.
        between = 2 * 2 * (56 + 4 * 4) + 2 * (48 + 4 * 3)
        assert numbers == [whole, blocks, whole + between, between]
