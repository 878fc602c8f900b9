"""Updates that are accumulated on a mesh equal those of one process with larger batches."""

import pathlib

import numpy as np
import pytest

from keras_psplus.cluster.testing import run_in_processes
from tests.all_reduce.updates_job import trained_on_larger_batches
from tests.selection import cases
from tests.support.results import load

JOB = pathlib.Path(__file__).with_name("updates_job.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
CASES = ["optimizers", "flush", "embedding", "places", "own_step", "loss_scale"]


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("updates")
    args = [folder, *cases(request)]
    return folder, run_in_processes(JOB, workers=4, timeout=560, env=ENVIRONMENT, args=args).logs


@pytest.mark.parametrize("case", CASES)
def test_accumulating_equals_one_process_on_larger_batches(case, job):
    model, _ = trained_on_larger_batches(case)
    folder, logs = job
    for worker, log in logs.items():
        found = load(folder / f"{case}.{worker}.npz", log)
        for weight, expected in zip(found.values(), model.get_weights(), strict=True):
            np.testing.assert_allclose(weight, expected, rtol=1e-6, atol=1e-6)
