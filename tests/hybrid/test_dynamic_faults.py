"""Jobs with a dynamic table that are killed, or whose workers do not wait for each other."""

import os
import pathlib
import signal
import sys

import numpy as np
import pytest

from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.processes import LocalCluster
from keras_psplus.cluster.testing import run_in_processes
from tests.hybrid.dynamic_fault_job import EPOCHS
from tests.hybrid.dynamic_job import BATCH, DIM, data
from tests.hybrid.reference import ENVIRONMENT, running_reference
from tests.parameter_server.waiting import wait_for
from tests.support.results import load

pytestmark = pytest.mark.processes

JOB = pathlib.Path(__file__).with_name("dynamic_fault_job.py")


def run(folder, *options, workers=2, ps=2, **others):
    args = [folder, *options]
    return run_in_processes(
        JOB, workers=workers, ps=ps, timeout=400, env=ENVIRONMENT, args=args, **others
    )


@pytest.mark.extended
@pytest.mark.parametrize("case", ["counted", "filtered"])
def test_a_killed_job_resumes_with_the_same_keys_rows_slots_and_counts(case, tmp_path):
    with running_reference(JOB, tmp_path, case, seconds=300):
        # In the second epoch, after all rows were written, and changes twice.
        killed = run(tmp_path, case, "die=10", "chain=3", expect_failure=True)
        assert killed.exit_codes["worker-0"] == -signal.SIGKILL
        # By another number of servers.
        resumed = run(tmp_path, case, ps=1)
    assert "training goes on after batch 3 of epoch 2" in resumed.logs["worker-0"]
    expected = np.load(tmp_path / f"{case}-reference.npz")
    for worker in ("worker-0", "worker-1"):
        found = load(tmp_path / f"{case}-{worker}.npz", resumed.logs[worker])
        for name in expected:
            np.testing.assert_allclose(
                found[name], expected[name], rtol=1e-4, atol=2e-5, err_msg=name
            )


def used():
    """How often each key comes, and in how many updates of two workers."""
    keys, updates = np.unique(data()[0]), {}
    uses = np.zeros(len(keys), np.int64)
    for batch in data()[0][: len(data()[0]) // BATCH * BATCH].reshape(-1, BATCH // 2, 5):
        np.add.at(uses, np.searchsorted(keys, batch), 1)
        for key in np.unique(batch).tolist():
            updates[key] = updates.get(key, 0) + EPOCHS
    return keys[uses > 0], EPOCHS * uses[uses > 0], [updates[k] for k in keys[uses > 0].tolist()]


def test_asynchronous_updates_count_once(tmp_path):
    result = run(tmp_path, "linear", "sync=0", "prefetch=1")
    keys, uses, updates = used()
    found = load(tmp_path / "linear-worker-0.npz", result.logs["worker-0"])
    np.testing.assert_array_equal(found["table_keys"], keys)
    np.testing.assert_array_equal(found["table_frequency"], updates)
    rows = np.repeat(-uses[:, np.newaxis] / BATCH / DIM, DIM, 1)
    np.testing.assert_allclose(found["table_rows"], rows, atol=1e-5)


@pytest.mark.extended
def test_an_asynchronous_job_goes_on_with_a_server_that_was_started_again(tmp_path):
    with LocalCluster(
        [sys.executable, str(JOB), str(tmp_path), "linear", "sync=0", "pause=0.5"],
        workers=2,
        ps=2,
        env={**ENVIRONMENT, "PYTHONPATH": python_path(os.environ)},
        log_dir=tmp_path / "logs",
        failure_grace=60,
        task_restarts=1,
        server_restarts=True,
    ) as job:
        wait_for(job.log_path("worker-0"), "batch 6.", seconds=120)
        os.kill(job.pids["ps-1"], signal.SIGKILL)
        result = job.wait(200)
        log = job.log_path("worker-0").read_text()
    assert result.exit_code == 0, result.tails(40)
    assert "ps-1" in log and "was started again, and goes on with its rows" in log, log
    keys, uses, updates = used()
    found = load(tmp_path / "linear-worker-0.npz", log)
    np.testing.assert_array_equal(found["table_keys"], keys)
    # Each row lacks the same of its updates as its server has lost.
    missing = np.array(updates) - found["table_frequency"]
    assert np.all(missing >= 0) and missing.any() and not missing.all()
    whole = missing == 0
    np.testing.assert_allclose(found["table_rows"][whole, 0], -uses[whole] / BATCH / DIM, atol=1e-5)
