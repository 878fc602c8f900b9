"""A chief that is killed while others build."""

import pathlib
import signal

import pytest

from tests.support.jobs import run_in_processes

JOB = pathlib.Path(__file__).with_name("builds_job.py")


@pytest.mark.extended
@pytest.mark.processes
def test_a_chief_that_is_killed_while_a_table_is_built_is_named():
    result = run_in_processes(
        JOB, workers=2, ps=1, timeout=100, expect_failure=True, failure_grace=60
    )
    assert result.exit_codes["worker-0"] == -signal.SIGKILL
    assert result.exit_codes["worker-1"] == 1
    log = result.logs["worker-1"]
    assert "built 1" in log and "PeerLostError: worker-0 (127.0.0.1:" in log, log[-3000:]
    assert "Received: " in log
