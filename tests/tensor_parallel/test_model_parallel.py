"""Weights cut along a mesh: equal to one process, in files too, and of known size."""

import numpy as np
import pytest

from tests.results import assert_close, load
from tests.sharding.test_shares import train_alone, train_in_cluster
from tests.tensor_parallel import cut_job

pytestmark = pytest.mark.timeout(1500)

JOB = cut_job.__file__
TOLERANCE = 2e-5
OPTIMIZERS = [
    f"mlp/{name}"
    for name in (
        *("sgd", "adamw", "adam_clipvalue", "average", "accumulate", "schedule_free"),
        *("loss_scale", "muon", "adafactor", "lamb"),
    )
]
# Their losses do not depend on keys' biases, which Adam moves by rounding errors.
MODELS = ["mlp", "mixed", "own_step", *(f"{n}/sgd" for n in ("transformer", "grouped"))]
HUB = ["gpt2/sgd", "bert/sgd"]
SQUARE = ["mlp/adamw", "own_step", "transformer/sgd", "mlp/accumulate"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cut")


@pytest.fixture(scope="module")
def alone(folder):
    return train_alone(folder / "alone", [*MODELS, *OPTIMIZERS, *HUB, "files", "resumed"], JOB)


@pytest.fixture(scope="module")
def two(folder):
    cases = [*MODELS, *OPTIMIZERS, *HUB, "bfloat16/sgd", "files", "parts"]
    return train_in_cluster(folder / "two", 2, cases, JOB, env={"WORKERS": "2"})


@pytest.fixture(scope="module")
def square(folder, two):
    env = {"WORKERS": "4", "LOADED": str(two[0] / "all.worker-1.keras")}
    return train_in_cluster(folder / "square", 4, [*SQUARE, "load"], JOB, env=env)


def check(alone, cluster, case, tolerance=TOLERANCE):
    path, result = cluster
    name = case.replace("/", "_")
    expected = load(alone / f"{name}.one.npz", "")
    for task, log in result.logs.items():
        assert_close(load(path / f"{name}.{task}.npz", log), expected, tolerance)


@pytest.mark.parametrize("case", [*MODELS, *OPTIMIZERS, *HUB, "files"])
def test_two_workers_equal_one_process(alone, two, case):
    check(alone, two, case)


@pytest.mark.parametrize("case", SQUARE)
def test_rows_divide_batches(alone, square, case):
    check(alone, square, case)


def test_each_worker_has_its_part(two):
    path, result = two
    for task, log in result.logs.items():
        found = load(path / f"parts.{task}.npz", log)
        np.testing.assert_array_equal(2 * found["kept"], found["whole"])
        assert found["slots"] == 2  # momentum and velocity
        # Gathered are positions, cut by width, and logits. Forward, a table and two layers of each
        # block are summed; backward, the gradients of what two cut layers of each multiply, and
        # those of the head.
        assert (found["gathered"], found["summed"]) == (2, 1 + 2 * 2 + 2 * 2 + 1)


def test_workers_of_a_row_draw_and_compute_alike(two):
    path, result = two
    # Of half precision, one process rounds in another order.
    first, second = (load(path / f"bfloat16_sgd.{t}.npz", log) for t, log in result.logs.items())
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value)
    assert np.isfinite(first["history/loss"]).all()


def test_table(two):
    log = two[1].logs["worker-0"]
    assert "over 1 x 2 workers: 7 of 11 variables are cut" in log
    assert "matched by no weight: " in log
    assert "'adamw' keeps the slots of 7 cut weights in parts" in log
    assert "'lamb' gathers 7 cut weights and their gradients for each update" in log


def test_files_go_on_elsewhere(folder, alone, two, square):
    expected = load(alone / "files.one.npz", "")
    env = {"LOADED": str(two[0] / "all.worker-0.keras")}
    one = load(train_alone(folder / "loaded", ["load"], JOB, **env) / "load.one.npz", "")
    assert_close(one, expected, TOLERANCE)
    for task, log in square[1].logs.items():
        assert_close(load(square[0] / f"load.{task}.npz", log), expected, TOLERANCE)


def test_backup_goes_on_with_another_mesh(folder, alone):
    env = {"WORKERS": "2"}
    train_in_cluster(folder / "backup", 2, ["failing"], JOB, expect_failure=True, env=env)
    env = {"WORKERS": "2", "MODEL": "1"}
    check(alone, train_in_cluster(folder / "backup", 2, ["resumed"], JOB, env=env), "resumed")
