"""A job goes on with other numbers of parameter servers, workers or stages, at the very step.

`make test` has those of three strategies here, and those of `shard=` and `ModelParallelStrategy` in
tests/sharding and tests/tensor_parallel.
"""

import json
import pathlib
import re

import pytest

from tests.support.jobs import run_in_processes
from tests.support.results import assert_close
from tests.support.tiers import extended

pytestmark = pytest.mark.processes
JOB = pathlib.Path(__file__).with_name("sizes_job.py")
# By strategy, tasks of the clusters that follow on each other.
CLUSTERS = {
    "all_reduce": [{"workers": workers} for workers in (2, 1)],
    "all_reduce_of_three": [{"workers": workers} for workers in (2, 3, 1)],
    "mirrored": [{"workers": 2, "ps": 1}, {"workers": 2, "ps": 1}],
    "hybrid": [{"workers": 2, "ps": 1}, {"workers": 1, "ps": 2}],
    "placement": [{"workers": 2, "ps": servers} for servers in (2, 1, 2)],
    "sync": [{"chief": True, "workers": 2, "ps": 1}, {"chief": True, "workers": 1, "ps": 2}],
    "async": [{"chief": True, "workers": 1, "ps": 2}, {"chief": True, "workers": 1, "ps": 3}],
    "pipeline": [{"chief": True, "workers": 3}, {"chief": True, "workers": 2}],
}
# Where a job is killed, and what the next one says. An epoch has 7 batches, and after every third
# batch of the job there is a backup.
KILLS = [("1:5", "after batch 5 of epoch 2"), ("2:5", "after batch 4 of epoch 3")]

# Of a pipeline, a stage is killed, which the chief names.
LOST_STAGE = re.compile(
    r"worker-1 \(127\.0\.0\.1:\d+\), which has stage 1 \(layers: .*\), stopped answering.*"
    "Received: "
)


def run(name, folder, tasks, *options):
    """The log of the task that speaks for all, and what it has printed."""
    is_killed, kind = any(option.startswith("kill") for option in options), name.split("_of_")[0]
    result = run_in_processes(
        *(JOB, kind, folder, *options), **tasks, expect_failure=is_killed, failure_grace=20
    )
    log = result.logs["chief-0" if tasks.get("chief") else "worker-0"]
    if is_killed and name == "pipeline":
        assert result.exit_codes["chief-0"] == 1, log
        assert LOST_STAGE.search(log), log
    return log, dict(json.loads(line) for line in log.splitlines() if line.startswith('["'))


@pytest.mark.parametrize(
    "name",
    [
        *("all_reduce", "hybrid", "pipeline"),
        *extended("all_reduce_of_three", "sync", "mirrored", "placement", "async"),
    ],
)
def test_a_job_that_is_killed_resumes_in_another_cluster(name, tmp_path):
    first, *others = CLUSTERS[name]
    _, found = run(name, tmp_path, first, "whole", f"kill={KILLS[0][0]}")
    assert "resumed" not in found
    whole = found["whole"]
    for number, tasks in enumerate(others):
        kill = [] if tasks is others[-1] else [f"kill={KILLS[number + 1][0]}"]
        log, found = run(name, tmp_path, tasks, *kill)
        assert f"training goes on {KILLS[number][1]}" in log, log[-4000:]
    assert_close(found["resumed"], whole, 2e-5)
