"""What becomes of a job whose tables' server or worker dies, or that asks for what is not there."""

import json
import os
import pathlib
import re
import signal
import sys
import time

import h5py
import numpy as np
import pytest

from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.processes import LocalCluster
from keras_psplus.cluster.testing import run_in_processes
from keras_psplus.hybrid import TableFiles
from tests.faults.damage import flip
from tests.hybrid import stranger
from tests.parameter_server.waiting import wait_for, wait_for_one_of

pytestmark = pytest.mark.processes

JOB = pathlib.Path(__file__).with_name("fault_job.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


def cluster(folder, *args, ps=2, **options):
    return LocalCluster(
        [sys.executable, str(JOB), *map(str, args)],
        workers=2,
        ps=ps,
        env={**ENVIRONMENT, "PYTHONPATH": python_path(os.environ)},
        log_dir=folder,
        # Whoever has to end has to do so by itself.
        failure_grace=60,
        **options,
    )


def that_fails(*options, failure_grace):
    """How a job ends that does not get to its last step."""
    return run_in_processes(
        JOB,
        workers=2,
        ps=1,
        timeout=560,
        env=ENVIRONMENT,
        args=[20, "-", *options],
        expect_failure=True,
        failure_grace=failure_grace,
    )


def test_an_id_out_of_range_is_named():
    # By the step that asks for it, not by the one before, which looks ahead.
    result = that_fails("bad_id=1", "prefetch=1", failure_grace=60)
    message = "ValueError: The layer sequential/embedding was asked for a row that its table does "
    assert message + "not have: ids go from 0 to 39. Received: id 43" in result.logs["worker-1"]
    assert "batch 7." in result.logs["worker-1"]
    assert result.exit_codes["ps-0"] == 1


@pytest.mark.extended
def test_a_worker_with_another_token_is_refused():
    # What becomes of those that a worker has left is no matter of this test.
    result = that_fails("stranger=1", failure_grace=0.5)
    assert result.first_failure == "worker-1"
    message = (
        r"ClusterStartupError: ps-0 \(127.0.0.1:\d+\): ps-0 belongs to another job: its token "
    )
    assert re.search(message + "differs. .* `job_token`", result.logs["worker-1"])
    assert result.exit_codes["worker-1"] == 1
    assert "batch" not in result.logs["worker-0"]


@pytest.mark.extended
def test_a_job_that_lost_a_server_resumes_where_it_was(tmp_path):
    args = (30, tmp_path, "backup=epoch", "momentum=0", "prefetch=1")
    with cluster(tmp_path / "first", *args, "pause=0.1") as job:
        wait_for(job.log_path("worker-0"), "batch 15.", seconds=120)
        os.kill(job.pids["ps-1"], signal.SIGKILL)
        began = time.monotonic()
        result = job.wait(90)
        assert not result.timed_out, result.tails(40)
        assert time.monotonic() - began < 60
    for name in ("worker-0", "worker-1"):
        assert result.exit_codes[name] == 1
        assert re.search(r"PeerLostError: .*ps-1 \(127.0.0.1:\d+\)", result.logs[name])
    with cluster(tmp_path / "second", *args) as job:
        result = job.wait(120)
    assert result.exit_code == 0, result.tails(40)
    # All steps count once, those of the first ten too.
    assert "batch 10." not in result.logs["worker-0"]
    assert "end iterations=30 off=0.0e+00" in result.logs["worker-0"]


@pytest.mark.extended
def test_a_server_that_hangs_is_named(tmp_path):
    with cluster(tmp_path, 40, tmp_path, "pause=0.1", "timeout=8") as job:
        wait_for(job.log_path("worker-0"), "batch 5.", seconds=120)
        os.kill(job.pids["ps-0"], signal.SIGSTOP)
        try:
            # The worker that gives up first names it alone; the other one may name both.
            logs = [job.log_path(name) for name in ("worker-0", "worker-1")]
            wait_for_one_of(logs, "PeerLostError: ps-0", "no answer in time", seconds=40)
        finally:
            os.kill(job.pids["ps-0"], signal.SIGCONT)
        codes = job.wait(60).exit_codes
        assert [codes["worker-0"], codes["worker-1"]] == [1, 1]


@pytest.mark.extended
def test_an_asynchronous_job_counts_every_gradient():
    args = [30, "-", "sync=0", "prefetch=1"]
    result = run_in_processes(JOB, workers=2, ps=2, timeout=560, env=ENVIRONMENT, args=args)
    assert "end iterations=30 off=0.0e+00" in result.logs["worker-0"]
    for name in ("ps-0", "ps-1"):
        assert f"worker-0 has ended, {name} ends" in result.logs[name]


def test_a_job_resumes_at_the_step_of_its_last_whole_backup(tmp_path):
    args = (30, tmp_path, "backup=4", "momentum=0.5", "shuffled=1", "own=1")
    backup = tmp_path / "backup"

    def run(name, *more, ps=2):
        with cluster(tmp_path / name, *args, *more, ps=ps) as job:
            result = job.wait(120)
        assert not result.timed_out, result.tails(40)
        return result

    # A server dies in the second `fit`, when it has written a part of the fourth one.
    result = run("first", "die=ps-1:4")
    for name in ("worker-0", "worker-1"):
        assert result.exit_codes[name] == 1
        assert re.search(r"PeerLostError: ps-1 \(127.0.0.1:\d+\)", result.logs[name])
    # Everybody can read the tables of the one before, which counts.
    files = TableFiles(backup)
    before = files.read(files.names[0])
    assert np.all(before < 0) and files.slots(files.names[0]) == 1
    # In the chief's file, they have no rows.
    with h5py.File(backup / "latest.weights.h5") as file:
        shapes = []
        file.visititems(lambda _, one: shapes.append(getattr(one, "shape", None)))
    assert (0, 4) in shapes and (40, 4) not in shapes
    # With one server in the place of two. Every row has its turn in the epoch that goes on, whose
    # order is that of the `fit` after one that has had validation data, and began at epoch 2.
    result = run("second", "tables=1", "exit=3", ps=1)
    assert result.exit_codes["worker-0"] == 3, result.tails(40)
    assert "training goes on after batch 2 of epoch 3" in result.logs["worker-0"]
    assert "call 1 of `fit` with the backup" in result.logs["worker-0"]
    assert "between: 160" in result.logs["worker-1"]
    for name in ("worker-0", "worker-1"):
        assert "batch 12." not in result.logs[name]
        ending = re.search(r"end iterations=30 off=(\S+)", result.logs[name])
        assert ending and float(ending[1]) < 1e-6, result.tails(40)
        assert "count=30\n" in result.logs[name]
        # No table has passed through a worker, neither one that was written nor one that was read.
        assert result.logs[name].count("whole tables: []") == 2
        assert "loaded off=0.0e+00" in result.logs[name]
    files = TableFiles(tmp_path / "tables")
    assert files.names == ["sequential/embedding/embeddings"]
    assert files.shape(files.names[0]) == (40, 4) and files.slots(files.names[0]) == 1
    assert np.all(files.read(files.names[0]) < 0)


@pytest.mark.extended
def test_a_backup_of_which_a_server_has_lost_rows_is_passed_over(tmp_path):
    args = ("backup=5", "accumulate=3", "double=1")

    def run(name):
        with cluster(tmp_path / name, 30, tmp_path, *args, ps=1) as job:
            result = job.wait(120)
        assert result.exit_codes["worker-0"] == 0, result.tails(40)
        return re.search("^weights .*$", result.logs["worker-0"], re.M)[0], result.logs["worker-0"]

    whole, _ = run("first")
    backup = tmp_path / "backup"
    stem = json.loads((backup / "tables.json").read_text())["stem"]
    (path,) = backup.glob(f"{stem}-0-of-1.data-00000-*")
    flip(path)
    resumed, log = run("second")
    assert "training goes on after batch 5 of epoch 2" in log, log
    assert re.search("resumes from the one before, at epoch 2. Received: ps-0 .*cannot read", log)
    assert "are lost" not in log
    assert resumed == whole
    # Those of the last two, and no others.
    assert len({p.name.split("-")[1] for p in backup.glob("tables-*")}) == 2


@pytest.mark.extended
def test_an_asynchronous_job_goes_on_with_a_server_that_was_started_again(tmp_path):
    args = (40, tmp_path, "sync=0", "backup=10", "pause=0.1", "timeout=120")
    # As under `keras-psplus run --restart task --max_restarts 1`.
    with cluster(tmp_path / "logs", *args, task_restarts=1, server_restarts=True) as job:
        log = job.log_path("worker-0")
        wait_for(log, "batch 1.", seconds=120)
        for task in job.tasks:
            if task.config.task_type == "ps":
                stranger.attack(task.config.address, str(tmp_path / "his"), dim=4)
        wait_for(log, "batch 13.", seconds=120)
        os.kill(job.pids["ps-1"], signal.SIGKILL)
        result = job.wait(120)
        text = log.read_text()
    assert result.exit_code == 0, result.tails(40)
    assert result.task_restarts == 1
    told = re.search(
        r"ps-1 \(127.0.0.1:\d+\) was started again, and goes on with its rows of the tables as "
        r"they were after batch \d+ of epoch \d. .*: (\d+) updates of sequential/embedding",
        text,
    )
    assert told, text
    assert not (tmp_path / "his").exists()
    # It has ended well, and nobody needs them.
    assert not [path for path in tmp_path.iterdir() if "backup" in path.name]
    # At each step, each worker sends this server two rows.
    ending = re.search(r"end iterations=40 off=\S+ missing=(\d+)", text)
    assert ending and int(ending[1]) == 2 * int(told[1]) > 0, text
