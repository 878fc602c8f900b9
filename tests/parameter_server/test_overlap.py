"""A worker reads for its next step while it computes and sends this one's gradients."""

import pathlib

from keras_psplus.cluster.testing import run_in_processes

JOB = pathlib.Path(__file__).with_name("overlap_job.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


def test_steps_under_way_together_lose_nothing():
    env = {**ENVIRONMENT, "OVERLAP_COMPRESSION": "int8"}
    result = run_in_processes(JOB, workers=2, ps=2, chief=True, timeout=560, env=env)
    assert "all cases are as expected" in result.logs["chief-0"]
