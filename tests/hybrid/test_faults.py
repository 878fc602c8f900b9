"""What becomes of a job whose tables' server or worker dies, or that asks for what is not there."""

import os
import pathlib
import re
import signal
import sys
import time

import pytest

from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.processes import LocalCluster
from keras_psplus.cluster.testing import run_in_processes
from tests.parameter_server.waiting import wait_for

JOB = pathlib.Path(__file__).with_name("fault_job.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


def cluster(folder, *args):
    return LocalCluster(
        [sys.executable, str(JOB), *map(str, args)],
        workers=2,
        ps=2,
        env={**ENVIRONMENT, "PYTHONPATH": python_path(os.environ)},
        log_dir=folder,
        # Whoever has to end has to do so by itself.
        failure_grace=60,
    )


def test_an_id_out_of_range_is_named():
    result = run_in_processes(
        JOB,
        workers=2,
        ps=1,
        timeout=120,
        env=ENVIRONMENT,
        # By the step that asks for it, not by the one before, which looks ahead.
        args=[20, "-", "bad_id=1", "prefetch=1"],
        expect_failure=True,
        failure_grace=60,
    )
    message = "ValueError: The layer sequential/embedding was asked for a row that its table does "
    assert message + "not have: ids go from 0 to 39. Received: id 43" in result.logs["worker-1"]
    assert "batch 7." in result.logs["worker-1"]
    assert result.exit_codes["ps-0"] == 1


@pytest.mark.parametrize("lost", ["ps-1", "worker-1"])
def test_a_job_that_lost_a_task_resumes_where_it_was(tmp_path, lost):
    prefetch = int(lost == "ps-1")
    args = (30, tmp_path, "backup=1", "pause=0.1", "momentum=0", f"prefetch={prefetch}")
    with cluster(tmp_path / "first", *args) as job:
        wait_for(job.log_path("worker-0"), "batch 15.", seconds=120)
        os.kill(job.pids[lost], signal.SIGKILL)
        began = time.monotonic()
        result = job.wait(90)
        assert not result.timed_out, result.tails(40)
        assert time.monotonic() - began < 60
    for name in {"worker-0", "worker-1"} - {lost}:
        assert result.exit_codes[name] == 1
        assert re.search(rf"PeerLostError: {lost} \(127.0.0.1:\d+\)", result.logs[name])
    with cluster(tmp_path / "second", *args) as job:
        result = job.wait(120)
    assert result.exit_code == 0, result.tails(40)
    # All steps count once, those of the first ten too.
    assert "batch 10." not in result.logs["worker-0"]
    assert "end iterations=30 off=0.0e+00" in result.logs["worker-0"]


def test_a_server_that_hangs_is_named(tmp_path):
    with cluster(tmp_path, 40, tmp_path, "pause=0.1", "timeout=5") as job:
        wait_for(job.log_path("worker-0"), "batch 5.", seconds=120)
        os.kill(job.pids["ps-0"], signal.SIGSTOP)
        try:
            wait_for(job.log_path("worker-0"), "PeerLostError: ps-0", seconds=40)
            wait_for(job.log_path("worker-0"), "no answer in time", seconds=5)
        finally:
            os.kill(job.pids["ps-0"], signal.SIGCONT)
        assert job.wait(60).exit_codes["worker-0"] == 1


def test_an_asynchronous_job_counts_every_gradient():
    args = [30, "-", "sync=0", "prefetch=1"]
    result = run_in_processes(JOB, workers=2, ps=2, timeout=120, env=ENVIRONMENT, args=args)
    assert "end iterations=30 off=0.0e+00" in result.logs["worker-0"]
    for name in ("ps-0", "ps-1"):
        assert f"worker-0 has ended, {name} ends" in result.logs[name]
