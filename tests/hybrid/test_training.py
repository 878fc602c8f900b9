"""Training with tables on two parameter servers equals training in one process."""

import pathlib

import numpy as np
import pytest

from tests.hybrid.reference import check_equals_reference, run_beside_reference
from tests.hybrid.training_job import CASES
from tests.selection import cases
from tests.support.results import load
from tests.support.tiers import extended

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]

JOB = pathlib.Path(__file__).with_name("training_job.py")
# The first is whole; the others each take a path of their own.
CORE = ["sgd", "two_tables", "beside_rows", "own_optimizer", "again", "keras_rs"]
CORE = [name for name in CORE if name in CASES]
MORE = [name for name in CASES if name not in (*CORE, "accumulated")]


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    """Where all have left what the cases come to, and the logs of the cluster."""
    folder, wanted = tmp_path_factory.mktemp("hybrid"), cases(request)
    names = [name for name in CASES if name in wanted]
    return folder, run_beside_reference(JOB, folder, names)


def results(job, case, worker):
    folder, logs = job
    return load(folder / f"{case}-{worker}.npz", logs[worker])


@pytest.mark.parametrize("case", [*CORE, "accumulated", *extended(*MORE)])
def test_equals_one_process(job, case):
    check_equals_reference(*job, case, CASES[case].tolerance)


@pytest.mark.parametrize("case", [*CORE, *extended(*MORE)])
def test_workers_agree_to_the_last_bit(job, case):
    first, second = (results(job, case, f"worker-{i}") for i in range(2))
    for name in first:
        if name.startswith("weight"):
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)
