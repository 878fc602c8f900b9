"""More optimizers and models with weights cut along a mesh, and a lost worker."""

import shutil

import numpy as np
import pytest

from tests.sharding.test_shares import (
    check_resumed,
    lose_a_worker,
    train_alone,
    train_in_cluster,
)
from tests.support.results import load
from tests.tensor_parallel.test_model_parallel import JOB, TOLERANCE, check

pytestmark = pytest.mark.timeout(1500)

OPTIMIZERS = "sgd adam_clipvalue average schedule_free loss_scale muon adafactor".split()
CASES = [*(f"mlp/{name}" for name in OPTIMIZERS), "transformer/sgd", "bert/sgd"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("more")


@pytest.fixture(scope="module")
def alone(folder):
    return train_alone(folder / "alone", [*CASES, "resumed"], JOB)


@pytest.fixture(scope="module")
def two(folder):
    env = {"WORKERS": "2"}
    return train_in_cluster(folder / "two", 2, [*CASES, "bfloat16/sgd"], JOB, env=env)


@pytest.mark.parametrize("case", CASES)
def test_two_workers_equal_one_process(alone, two, case):
    check(alone, two, case)


def test_workers_of_a_row_compute_alike(two):
    path, result = two
    # In half precision, one process rounds in another order.
    first, second = (load(path / f"bfloat16_sgd.{t}.npz", log) for t, log in result.logs.items())
    for name, value in first.items():
        assert value.tobytes() == second[name].tobytes(), name
    assert np.isfinite(first["history/loss"]).all()


@pytest.fixture(scope="module")
def lost(folder):
    return lose_a_worker(folder / "lost", 4, JOB, WORKERS="4")


@pytest.mark.parametrize("workers, model", [(4, 2), (2, 2), (2, 1)])
def test_job_goes_on_from_its_backup_when_a_worker_is_lost(folder, alone, lost, workers, model):
    """On the same mesh, with fewer rows, and without a cut."""
    env = {"WORKERS": str(workers), "MODEL": str(model)}
    path = shutil.copytree(lost, folder / f"resumed by {workers} {model}")
    resumed = train_in_cluster(path, workers, ["resumed"], JOB, env=env)
    check_resumed(alone, resumed, TOLERANCE, epoch=1)
