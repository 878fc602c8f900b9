"""Weights in shares: equal to one process, in files too, with known bytes, and freed by units."""

import pathlib
import shutil

import numpy as np
import pytest

from tests.selection import cases
from tests.sharding.full_job import MODELS
from tests.sharding.test_shares import (
    ENDED,
    check,
    check_resumed,
    compared,
    lose_a_worker,
    of_two,
    train_alone,
    train_in_cluster,
)
from tests.support.results import assert_close, load

pytestmark = pytest.mark.timeout(1500)

JOB = pathlib.Path(__file__).with_name("full_job.py")
# Element by element, whole on one worker, whole on all.
OPTIMIZERS = ["accumulate", "loss_scale", "schedule_free", "muon", "counting"]
CASES = [*MODELS, *OPTIMIZERS, "embedding/momentum_clipnorm", "two_optimizers", "files"]
THREE = ["transformer", "convolutional", "tied", "muon", "adamw"]
COMPILED = ["encoder", "convolutional", "tied", "branching", "mixed", "several"]
COMPILED_TEST = "test_compiled_units_equal_one_compiled_process"
# Of bfloat16, sums in another order differ in the third digit.
TOLERANCES = {"mixed": 3e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("full_shares")


@pytest.fixture(scope="module")
def alone(request, folder):
    return train_alone(folder / "alone", [*compared(request), "resumed"], JOB)


@pytest.fixture(scope="module")
def two(request, folder):
    names = of_two(request, "test_state_bytes_and_units", ENDED)
    return train_in_cluster(folder / "two", 2, names, JOB)


@pytest.fixture(scope="module")
def three(request, folder, two):
    env = {"LOADED": str(two[0] / "all.worker-0.keras"), "KEEPS": "1"}
    names = [*cases(request, "test_three_workers_equal_one_process"), "load", "units"]
    return train_in_cluster(folder / "three", 3, names, JOB, env=env)


@pytest.fixture(scope="module")
def compiled_alone(request, folder):
    names = cases(request, COMPILED_TEST)
    return train_alone(folder / "compiled alone", names, JOB, COMPILES="1")


@pytest.fixture(scope="module")
def compiled(request, folder):
    names = [*cases(request, COMPILED_TEST, "test_what_units_leave_uncompiled_is_said"), "units"]
    env = {"COMPILES": "1"}
    return train_in_cluster(folder / "compiled", 2, names, JOB, env=env)


@pytest.mark.parametrize("case", CASES)
def test_two_workers_equal_one_process(alone, two, case):
    check(alone, two, case, TOLERANCES.get(case, 2e-5))


@pytest.mark.parametrize("case", THREE)
def test_three_workers_equal_one_process(alone, three, case):
    check(alone, three, case, 2e-5)


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_units_equal_one_compiled_process(compiled_alone, compiled, case):
    check(compiled_alone, compiled, case, TOLERANCES.get(case, 2e-5))


@pytest.mark.cases("convolutional", "branching", "several")
def test_what_units_leave_uncompiled_is_said(compiled):
    log = compiled[1].logs["worker-0"]
    assert "the call of 'batch_normalization': XLA cannot compile its CollectiveGather" in log
    assert "the call of 'writing': it changes weights in shares" in log
    assert "the call of 'differentiating': it computes gradients itself" in log


@pytest.mark.cases("units")
@pytest.mark.parametrize("compiles", [False, True])
def test_state_bytes_and_units(request, compiles):
    """Parts of weights, and a step's bytes and gatherings."""
    path, result = request.getfixturevalue("compiled" if compiles else "two")
    found = load(path / "units.worker-1.npz", result.logs["worker-1"])
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
    assert found["left"] == 0 and (found["functions"] > 0) == compiles
    assert found["read alone"] == pytest.approx(found["read"])
    log = result.logs["worker-0"]
    assert "in shares: 8 of 8 variables are cut into equal parts" in log


def test_weights_that_are_kept_send_no_more_than_all_reduce(three):
    path, result = three
    found = load(path / "units.worker-0.npz", result.logs["worker-0"])
    all_reduced = 4 * found["whole"].sum() * 4 / 3
    assert all_reduced <= found["wire"] <= 1.02 * all_reduced
    assert "backward" not in found


@pytest.mark.cases("ended", "adamw")
def test_slots_can_be_read_when_other_workers_have_ended(alone, two):
    path, result = two
    found = load(path / "ended.worker-0.npz", result.logs["worker-0"])
    expected = load(alone / "adamw.one.npz", "")
    slots = {k.replace("slots", "ended"): v for k, v in expected.items() if k.startswith("slots")}
    assert_close(found, slots, 2e-5)


@pytest.mark.cases("files")
def test_files_go_on_elsewhere(folder, alone, two, three):
    expected = load(alone / "files.one.npz", "")
    slots = {k.replace("slots", "read"): v for k, v in expected.items() if k.startswith("slots")}
    later = {k: v for k, v in expected.items() if k.startswith("later")}
    env = {"LOADED": str(two[0] / "all.worker-1.keras")}
    one = load(train_alone(folder / "loaded", ["load"], JOB, **env) / "load.one.npz", "")
    assert_close(one, slots | later, 2e-5)
    for task, log in three[1].logs.items():
        assert_close(load(three[0] / f"load.{task}.npz", log), slots | later, 2e-5)


@pytest.fixture(scope="module")
def lost(folder):
    return lose_a_worker(folder / "lost", 3, JOB)


@pytest.mark.parametrize("workers", [2, 3])
def test_job_goes_on_from_its_backup_when_a_worker_is_lost(folder, alone, lost, workers):
    path = shutil.copytree(lost, folder / f"resumed by {workers}")
    check_resumed(alone, train_in_cluster(path, workers, ["resumed"], JOB), 2e-5)
