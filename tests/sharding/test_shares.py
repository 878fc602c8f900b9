"""The optimizer's state in shares: equal to one process, in files too, and of known size."""

import pytest

from tests.sharding import cases
from tests.sharding.checks import check_compressed, check_groups, check_parts
from tests.support.cluster import equals_one_process, run
from tests.support.tiers import extended

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

SAID = {
    "muon": "lie whole on one worker each (its update is not known to be element-wise)",
    "counting": "nothing is cut (variable 'counting_sgd/count' is of no one variable",
}


@pytest.mark.parametrize("name", extended(*SAID))
def test_two_workers_equal_one_process(name):
    found = equals_one_process("opt2", cases.trained, name=name)
    assert SAID[name] in found.logs["worker-0"]


def test_two_workers_keep_and_send_their_parts():
    found = check_parts("opt2", 2, "adamw", "the slots of 6 variables are cut into equal parts")
    # Momentum and velocity are as many numbers each as the gradients, of which an all-reduce of
    # two workers sends as many bytes as they have.
    all_reduced = 4 * found["whole"].sum() / 2
    assert all_reduced <= found["wire"] <= 1.1 * all_reduced


def test_rows_without_slots_are_sent_as_under_all_reduce():
    found = run("opt2", cases.bytes_of_table).first
    # No half of 1000 rows of 4 numbers.
    assert 0 < found["wire"] < 4 * 1000 * 4 / 2 / 2


@pytest.mark.parametrize("name", extended("muon", "loss_scale"))
def test_accumulated_updates_equal_those_of_one_process(name):
    equals_one_process("opt2", cases.accumulated, name=name)


@pytest.mark.extended
def test_three_workers_equal_one_process():
    equals_one_process("opt3", cases.trained, name="adafactor")


def test_groups_of_two_of_four_workers_equal_one_process():
    found = check_parts("opt4_groups", 2, "adamw")
    # Momentum and velocity are as many numbers each as the gradients, of which a worker sends half
    # to the other of its group, its own half to the other group, and half of new values.
    sent = 4 * 3 / 2 * found["whole"].sum() / 2
    assert sent <= found["wire"] <= 1.1 * sent


@pytest.mark.extended
def test_gradients_between_groups_are_compressed():
    # Floats inside; halves of halves between groups, twice; bf16 of new values inside.
    check_compressed(
        "opt4_groups",
        lambda numbers, encoded: 4 * numbers / 2 + encoded / 2 + 2 * numbers / 2,
    )


@pytest.mark.extended
def test_parts_along_a_topology_equal_one_process():
    found = check_groups("opt4_topology", "muon", 4)
    # Of as many bytes as those of an all-reduce, a third goes between groups.
    sent = 4 * 3 / 2 * found["whole"].sum() / 2
    assert sent <= found["wire"] <= 1.2 * sent
    assert found["between"] == pytest.approx(found["wire"] / 3)


@pytest.mark.extended
def test_gradients_between_groups_of_a_topology_are_compressed():
    # Floats inside, twice; a quarter of gradients and of new values between groups.
    check_compressed(
        "opt4_topology", lambda numbers, encoded: 4 * numbers + encoded / 4 + 2 * numbers / 4
    )
