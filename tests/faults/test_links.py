"""Links of a job's tasks, which are delayed and cut while it trains."""

import pathlib
import re
import sys

import pytest

from keras_psplus.chaos import netlab, spec
from keras_psplus.chaos.injector import Injector
from keras_psplus.cluster.environment import plan_tasks, python_path
from keras_psplus.cluster.processes import LocalCluster

JOB = pathlib.Path(__file__).with_name("job.py")


def test_a_job_goes_on_over_a_link_that_was_slow_and_cut(tmp_path):
    problem = netlab.why_not(delay=1e-3)
    if problem is not None:
        pytest.skip(f"no network namespaces here: {problem}")
    delay, cut = "delay:worker1@step=3,ms=500,for=1", "cut:worker1@step=12,for=2"
    events = spec.parse(f"{cut}; {delay}", [task.name for task in plan_tasks(workers=2)])
    lines, leader = [], tmp_path / "worker-0.log"

    def log(line):
        lines.append((line, re.findall(r"^epoch (\d)", leader.read_text(), re.MULTILINE)))

    with Injector(events, log) as chaos:
        environ = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
        cluster = LocalCluster(
            [sys.executable, str(JOB), "all_reduce", str(tmp_path)],
            workers=2,
            env={**environ, **chaos.environment, "PYTHONPATH": python_path()},
            log_dir=tmp_path,
            network=netlab.Lab(2),
        )
        chaos.watch(cluster)
        with cluster:
            result = cluster.wait(200)
    assert result.exit_code == 0 and not result.timed_out, result.tails(60)
    # The epoch of 10 steps did not end before the fault was over.
    assert lines == [
        (f"chaos: {delay} comes after step 3", ["0"]),
        (f"chaos: {delay} is over", ["0"]),
        (f"chaos: {cut} comes after step 12", ["0", "1"]),
        (f"chaos: {cut} is over", ["0", "1"]),
    ], result.tails(60)
    for log in result.logs.values():
        found = re.search(r"end iterations=30 off=(\S+)", log)
        assert found and float(found[1]) < 1e-6, result.tails(60)
