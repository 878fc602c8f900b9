"""Datasets that the workers read: each element once an epoch, also when a worker dies."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from keras_psplus.cluster.processes import LocalCluster
from keras_psplus.cluster.testing import run_in_processes
from tests.parameter_server.waiting import wait_for

JOB = pathlib.Path(__file__).with_name("worker_data_job.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
ROWS = 331


@pytest.fixture
def numbers(tmp_path):
    folder = tmp_path / "numbers"
    folder.mkdir()
    for i in range(5):
        lines = [str(n) for n in range(1, ROWS + 1) if n % 5 == i]
        (folder / f"{i}.txt").write_text("\n".join(lines) + "\n")
    return folder


def totals(log, label, name):
    found = re.search(rf"^{label} {name}: \[(.*)\] (.*)$", log, re.MULTILINE)
    assert found, log[-4000:]
    return [float(total) for total in [*found.group(1).split(", "), found.group(2)]]


def check_that_each_was_seen_once(log, label):
    for power in range(3):
        expected = sum(n**power for n in range(1, ROWS + 1))
        seen = totals(log, label, f"power_{power}")
        assert seen == [expected] * 3, (power, seen)


def test_each_element_is_seen_once_an_epoch(numbers):
    kinds = "FILE,DATA,DISTRIBUTED,FUNCTION"
    result = run_in_processes(
        JOB, workers=2, ps=1, chief=True, timeout=560, env=ENVIRONMENT, args=[numbers, kinds]
    )
    log = result.logs["chief-0"]
    for policy, steps_per_execution in (("FILE", 3), ("DATA", 1)):
        assert f"each reads its own share (AutoShardPolicy.{policy})" in log
        label = f"{policy} {steps_per_execution}"
        check_that_each_was_seen_once(log, label)
        endless = re.search(rf"{label} endless: \[(.*), (.*)\]", log)
        assert [float(n) for n in endless.groups()] == [120.0, 120.0]
    assert f"DATA 1 calls: {2 * -(-ROWS // 4)}" in log
    assert f"predicted {ROWS}" in log
    assert "changing lengths: [3.0, 9.0, 2.0]" in log
    assert "this dataset cannot be sent to the workers (it reads from the tf.data service)" in log
    assert f"service: {[float(ROWS)] * 3} {[ROWS * (ROWS + 1) / 2] * 3}" in log
    for kind in ("DISTRIBUTED", "FUNCTION"):
        check_that_each_was_seen_once(log, kind)
        assert f"{kind} predicted {ROWS}" in log
    assert "each reads what the script's function has made for it" in log
    assert "this dataset cannot be sent to the workers (it uses HashTableV2" in log
    assert "done" in log


def test_the_chief_reads_what_was_distributed_where_it_decides():
    job = JOB.with_name("distributed_data_job.py")
    done = subprocess.run(
        [sys.executable, str(job)],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("done ") == 2, done.stdout[-4000:]


def test_a_dead_workers_share_is_read_on(numbers, tmp_path):
    command = [sys.executable, str(JOB), str(numbers), "DATA", "0.05"]
    with LocalCluster(
        command,
        workers=2,
        ps=1,
        chief=True,
        env=ENVIRONMENT,
        log_dir=tmp_path / "logs",
        failure_grace=70,
    ) as cluster:
        log = cluster.log_path("chief-0")
        wait_for(log, "batch 20\n")
        os.kill(cluster.pids["worker-1"], signal.SIGKILL)
        wait_for(log, "DATA 1 calls")
    check_that_each_was_seen_once(log.read_text(), "DATA 1")
