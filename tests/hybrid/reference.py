"""The one process whose results those of a cluster are held against."""

import contextlib
import os
import subprocess
import sys

import numpy as np

from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.testing import run_in_processes
from tests.support.results import load

ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


@contextlib.contextmanager
def running_reference(job, *args, seconds):
    """Runs a job with `--reference` and without a cluster, beside what the block does.

    Args:
        job: Path of the script.
        *args: Its other arguments.
        seconds: How long it may go on after the block.
    """
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path(os.environ)}
    environment.pop("TF_CONFIG", None)
    with subprocess.Popen(
        [sys.executable, job, *args, "--reference"], env=environment, stdout=subprocess.DEVNULL
    ) as reference:
        try:
            yield
            assert reference.wait(seconds) == 0
        finally:
            reference.kill()


def check_equals_reference(folder, logs, case, tolerance):
    """Checks that each of two workers has left what the reference has left of a case."""
    expected = np.load(folder / f"{case}-reference.npz")
    for worker in ("worker-0", "worker-1"):
        found = load(folder / f"{case}-{worker}.npz", logs[worker])
        assert sorted(found) == sorted(expected)
        for name in expected:
            np.testing.assert_allclose(
                found[name], expected[name], rtol=1e-4, atol=tolerance, err_msg=name
            )


def run_beside_reference(job, folder, names, *options):
    """Runs cases of a job on two workers and two servers, and in one process; returns the logs.

    Args:
        *options: Further arguments of the tasks of the cluster.
    """
    args = [folder, ",".join(names)]
    with running_reference(job, *args, seconds=300):
        args += options
        done = run_in_processes(job, workers=2, ps=2, timeout=900, env=ENVIRONMENT, args=args)
    return done.logs
