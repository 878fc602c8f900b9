"""Errors of lost tasks are told apart from those of a step, as TensorFlow raises them."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

JOB = pathlib.Path(__file__).with_name("losses_job.py")


@pytest.fixture(scope="module")
def found():
    done = subprocess.run(
        [sys.executable, "-u", str(JOB)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
        cwd=JOB.parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return {case: kinds for case, *kinds in lines}


@pytest.mark.parametrize("case", ["check on a worker", "index on a server"])
def test_errors_of_a_step_are_of_no_lost_task(found, case):
    assert found[case] == ["InvalidArgumentError", False, False]


@pytest.mark.parametrize("case", ["lost worker", "worker started again", "its tensors"])
def test_errors_of_a_lost_worker(found, case):
    assert found[case][1:] == [True, False]


@pytest.mark.parametrize("case", ["lost server", "server started again"])
def test_errors_of_a_lost_server(found, case):
    assert found[case][1:] == [False, True]
