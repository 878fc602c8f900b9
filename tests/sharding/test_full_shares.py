"""Weights in shares: equal to one process, in files too, with known bytes, and freed by units."""

import numpy as np
import pytest

from tests.sharding import cases, unit_cases
from tests.sharding.checks import check_compressed, check_files, check_groups
from tests.support.cluster import equals_one_process, reference, run
from tests.support.results import assert_close
from tests.support.tiers import extended

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TRAINED = ["encoder"]
SAID = {
    "branching": "the call of 'writing': it changes weights in shares",
    "several": "the call of 'differentiating': it computes gradients itself",
}


@pytest.mark.parametrize("name", [*TRAINED, *extended("several", "repeating")])
def test_models_equal_one_process(name):
    equals_one_process("all2", unit_cases.trained, name=name)


@pytest.mark.parametrize("name", extended("branching", "several"))
def test_compiled_units_equal_one_process(name):
    found = run("all2", unit_cases.trained, name=name, jit_compile=True)
    assert_close(found.first, reference(unit_cases.trained, name=name), 2e-5)
    assert SAID.get(name, "") in found.logs["worker-0"]


def test_state_bytes_and_units():
    """Parts of weights, and a step's bytes and gatherings."""
    results = run("all2", unit_cases.units, same=False, jit_compile=True)
    found = results["worker-1"]
    np.testing.assert_array_equal(found["kept"], -(-found["whole"] // 2))
    # Backward needs no biases, and what is gathered last is still there.
    wire = 4 * found["whole"].sum() + 2 * (7 * 80 + 80 * 80)
    assert wire <= found["wire"] <= 1.02 * wire
    # Two layers in one, and a nested model.
    assert found["forward"] == 3
    # Small layers of a functional model share a gathering.
    assert set(found["apart"]) == {1} and set(found["together"]) == {5}
    assert found["backward"].tolist() == ["kernel", "kernel"]
    # Nothing of backward computes with what forward has gathered, if it was gathered again.
    assert found["left"] == 0 and found["functions"] > 0
    assert results.first["read alone"] == pytest.approx(found["read"])
    assert "in shares: 8 of 8 variables are cut into equal parts" in results.logs["worker-0"]


def test_weights_that_are_kept_send_no_more_than_all_reduce():
    options = {"jit_compile": False, "reshard_after_forward": False}
    found = run("all2", unit_cases.units, same=False, **options).first
    all_reduced = 4 * found["whole"].sum()
    assert all_reduced <= found["wire"] <= 1.02 * all_reduced
    assert "backward" not in found


@pytest.mark.extended
def test_accumulated_updates_equal_those_of_one_process():
    equals_one_process("all2", cases.accumulated, name="muon")


@pytest.mark.extended
def test_compressed_training_learns_as_much():
    # Backward needs the first kernel again, and the second is still there.
    check_compressed("all2", lambda numbers, encoded: encoded / 2 + numbers + 64 * 96)


@pytest.mark.extended
def test_files_go_on_in_one_process(tmp_path):
    check_files("all2", tmp_path, "plain")


@pytest.mark.extended
def test_three_workers_that_keep_weights_equal_one_process():
    found = run("all3", unit_cases.trained, name="encoder", reshard_after_forward=False)
    assert_close(found.first, reference(unit_cases.trained, name="encoder"), 2e-5)


@pytest.mark.extended
def test_files_go_on_with_three_workers(tmp_path):
    check_files("all2", tmp_path, "all3")


@pytest.mark.extended
@pytest.mark.parametrize(
    "layout, sharing, name", [("all4_groups", 2, "muon"), ("all4_topology", 4, "embedding/adamw")]
)
def test_groups_of_four_workers_equal_one_process(layout, sharing, name):
    check_groups(layout, name, sharing)
