"""Update policies on two workers, beside what one process computes on the same batches."""

import functools

import keras
import numpy as np
import pytest

from tests.all_reduce import updates_cases as cases
from tests.all_reduce import updates_simulation as simulation
from tests.all_reduce.updates_cases import EPOCHS, LOCAL, dense, problem, slices
from tests.sharding import cases as sharding_cases
from tests.support.cluster import equals_one_process, reference, run
from tests.support.results import assert_all_close, assert_same, weights_of
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

# Losses of small runs of DiLoCo, to notice what every other test might take for granted.
GOLDEN = {
    "diloco": [1.052823, 1.133299, 1.016032],
    "fragments": [1.071741, 1.070355, 0.936446],
}
BATCHES = EPOCHS * len(slices())


def check_accumulated(name, found):
    expected = reference(cases.on_larger_batches, name=name)
    assert_all_close(weights_of(found), weights_of(expected), 1e-6)
    assert found["updates"] == expected["updates"] > 0
    if name != "loss_scale":
        assert found["updates"] == expected["batches"]


@pytest.mark.parametrize(
    "name",
    ["flush", *extended("loss_scale", "places", "eagerly")],
)
def test_accumulating_equals_one_process_on_larger_batches(name):
    found = run("ar2", cases.accumulated, name=name).first
    check_accumulated(name, found)
    if name != "places":
        assert found["own bytes"] == found["updates"] * sum(w.nbytes for w in weights_of(found))


@pytest.mark.parametrize("name", ["embedding/adagrad", "places"])
def test_rows_that_wait_at_an_epoch_s_end_are_applied_then(name):
    equals_one_process("ar2", sharding_cases.accumulated, name=name)


INNER = {
    "sgd": lambda: simulation.SGD(0.3),
    "momentum": lambda: simulation.SGD(0.1, 0.9),
    "ema": lambda: simulation.SGD(0.3, ema=0.8),
}


def first_weights():
    keras.utils.set_random_seed(1)
    return dense("sgd").get_weights()


def simulated(name, workers):
    (kind, arguments), optimizer = LOCAL[name]
    policy, outer = cases.of(LOCAL[name][0]), None
    if name == "outer adam":
        outer = functools.partial(simulation.Adam, 0.05)
    elif kind == "DiLoCo":
        outer = functools.partial(simulation.SGD, 0.7, 0.9, nesterov=True)
    # By size: the first kernel balances all others.
    fragments = [[0], [2, 1, 3]] if arguments.get("fragments") == 2 else [[0, 1, 2, 3]]
    steps = simulation.Simulation(
        policy, first_weights(), INNER[optimizer], outer, fragments, workers
    )
    x, y = problem()
    for _ in range(EPOCHS):
        for rows in slices():
            steps.step(x[rows], y[rows])
        steps.finish()
    return steps.inner[0].average or steps.weights[0]


# How often all weights are sent. In each epoch of four batches: after each; twice, the second time
# as it ends; with momenta; and six gradients, then the rest of an epoch and another epoch, with
# moving averages as well.
SENT = {"every step": BATCHES, "diloco": EPOCHS * 2, "slots": EPOCHS * 2 * 2}
SENT["post-local"] = 6 + 2 * (1 + 2)


@pytest.mark.parametrize(
    "name",
    [
        "fragments",
        *extended("slots", "diloco", "every step", "post-local", "outer adam", "overlap"),
    ],
)
def test_workers_that_step_alone_compute_what_the_papers_say(name):
    found = run("ar2", cases.local, name=name).first
    assert_all_close(weights_of(found), simulated(name, 2), 5e-6)
    if name in GOLDEN:
        np.testing.assert_allclose(found["losses"], GOLDEN[name], rtol=1e-4)
    assert found["updates"] == BATCHES
    if name in SENT:
        assert found["sent"] == SENT[name] * sum(weight.nbytes for weight in weights_of(found))


def test_averaging_at_every_step_is_synchronous_training():
    weights, optimizer = first_weights(), simulation.SGD(0.3)
    x, y = problem()
    for rows in EPOCHS * slices():
        optimizer.step(weights, simulation.gradients(weights, x[rows], y[rows]))
    assert_all_close(simulated("every step", 2), weights, 1e-6)


def test_workers_that_look_at_their_weights_together_see_the_same(tmp_path):
    first, second = run("ar2", cases.meetings, folder=str(tmp_path)).values()
    for i in range(4):
        ours, theirs = first[f"own apart/{i}"], second[f"own apart/{i}"]
        assert not np.array_equal(ours, theirs)
        np.testing.assert_allclose(first[f"together/{i}"], (ours + theirs) / 2, atol=1e-6)


def test_optimizers_that_are_no_attributes_are_known():
    assert run("ar2", cases.optimizers_of_parts).first


@pytest.mark.parametrize("name", extended("diloco", "two optimizers", "accumulate"))
def test_resumed_training_is_as_if_never_interrupted(name):
    found = run("ar2", cases.interrupted, name=name).first
    assert_same(weights_of(found, "resumed"), weights_of(found, "whole"))
    if name == "diloco":
        logical, compressed = found["own bytes"]
        assert compressed < logical / 2


@pytest.mark.extended
def test_training_goes_on_from_a_state_of_the_scripts_own():
    found = run("ar2", cases.by_hand).first
    assert_same(weights_of(found, "resumed"), weights_of(found, "whole"))


@pytest.mark.extended
def test_two_devices_of_a_process_do_the_same():
    check_accumulated("optimizers", run("devices2", cases.accumulated, name="optimizers").first)
    found = run("devices2", cases.local, name="fragments").first
    assert_all_close(weights_of(found), simulated("fragments", 2), 5e-6)
