"""Errors of lost tasks are told apart from those of a step, as TensorFlow raises them."""

import json
import pathlib

import pytest

from tests.support import jobs

JOB = pathlib.Path(__file__).with_name("losses_job.py")


@pytest.mark.extended
@pytest.mark.processes
def test_errors_are_of_a_lost_worker_a_lost_server_or_a_step():
    lines = jobs.run_script(JOB, may_show_errors=True, TF_CPP_MIN_LOG_LEVEL=3).splitlines()
    found = [json.loads(line) for line in lines if line.startswith('["')]
    kinds = {case: (is_worker, is_server) for case, _, is_worker, is_server in found}
    assert kinds == {
        "check on a worker": (False, False),
        "index on a server": (False, False),
        "lost worker": (True, False),
        "worker started again": (True, False),
        "its tensors": (True, False),
        "lost server": (False, True),
        "server started again": (False, True),
    }
    assert [name for _, name, *_ in found[:2]] == ["InvalidArgumentError"] * 2
