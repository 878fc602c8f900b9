"""Training with tables on two parameter servers equals training in one process."""

import pathlib

import numpy as np
import pytest

from keras_psplus.cluster.testing import run_in_processes
from tests.hybrid.reference import ENVIRONMENT, beside
from tests.hybrid.training_job import CASES

JOB = pathlib.Path(__file__).with_name("training_job.py")
TOGETHER = [name for name in CASES if name != "accumulated"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where all have left what the cases come to."""
    folder = tmp_path_factory.mktemp("hybrid")
    with beside(JOB, folder, ",".join(CASES), seconds=60):
        for names in (TOGETHER, ["accumulated"]):
            args = [folder, ",".join(names)]
            run_in_processes(JOB, workers=2, ps=2, timeout=300, env=ENVIRONMENT, args=args)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_equals_one_process(folder, case):
    expected = np.load(folder / f"{case}-reference.npz")
    for worker in ("worker-0", "worker-1"):
        found = np.load(folder / f"{case}-{worker}.npz")
        assert sorted(found) == sorted(expected)
        for name in expected:
            np.testing.assert_allclose(
                found[name], expected[name], rtol=1e-4, atol=CASES[case].tolerance, err_msg=name
            )


@pytest.mark.parametrize("case", TOGETHER)
def test_workers_agree_to_the_last_bit(folder, case):
    first, second = (np.load(folder / f"{case}-worker-{i}.npz") for i in range(2))
    for name in first:
        if name.startswith("weight"):
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)
