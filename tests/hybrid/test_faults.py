"""What becomes of a job whose tables' server or worker dies, hangs, or is of another job."""

import json
import os
import pathlib
import re
import signal
import sys

import h5py
import numpy as np
import pytest

from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.processes import LocalCluster
from keras_psplus.files.tables import latest
from keras_psplus.hybrid import TableFiles
from tests.faults.damage import flip
from tests.hybrid import stranger
from tests.hybrid.test_cache import ages
from tests.support.jobs import run_in_processes, wait_for
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

JOB = pathlib.Path(__file__).with_name("fault_job.py")
WORKERS = "worker-0", "worker-1"
# Tasks do not go through it.
UNREACHABLE_PROXY = {"http_proxy": "http://127.0.0.1:9"}


def cluster(folder, *args, ps=2, **options):
    return LocalCluster(
        [sys.executable, str(JOB), *map(str, args)],
        workers=2,
        ps=ps,
        env={"PYTHONPATH": python_path(os.environ), **UNREACHABLE_PROXY},
        log_dir=folder,
        # Whoever has to end has to do so by itself.
        failure_grace=60,
        **options,
    )


def run(folder, *args, exit_code=0, **options):
    """How a job ends that nobody disturbs from outside."""
    with cluster(folder, *args, **options) as job:
        result = job.wait(120)
    assert not result.timed_out, result.tails(40)
    if exit_code is not None:
        assert result.exit_codes["worker-0"] == exit_code, result.tails(40)
    return result


def check_names_lost_server(result, name="ps-1"):
    for worker in WORKERS:
        assert result.exit_codes[worker] == 1, result.tails(40)
        assert re.search(rf"PeerLostError: .*{name} \(127.0.0.1:\d+\)", result.logs[worker])


# The last has a train_step with optimizers and a count of its own, and reads rows ahead.
@pytest.mark.parametrize("more", extended("", "shard=all", "own=1 prefetch=1"))
def test_a_job_resumes_at_the_step_of_its_last_whole_backup(more, tmp_path):
    args = (30, tmp_path, "backup=4", "momentum=0.5", "shuffled=1", *more.split())
    backup = tmp_path / "backup"
    # A server dies in the second `fit`, when it has written a part of the fourth one.
    check_names_lost_server(run(tmp_path / "first", *args, "die=ps-1:4", exit_code=None))
    # Everybody can read the tables of the one before, which counts.
    files = TableFiles(backup)
    before = files.read("embedding/embeddings")
    assert np.all(before < 0) and files.slots("embedding/embeddings") == 1
    # In the chief's file, they have no rows.
    with h5py.File(backup / latest(str(backup))[0] / "latest.weights.h5") as file:
        shapes = []
        file.visititems(lambda _, one: shapes.append(getattr(one, "shape", None)))
    assert (0, 4) in shapes and (40, 4) not in shapes
    # With one server in the place of two. Every row has its turn in the epoch that goes on, whose
    # order is that of the `fit` after one that has had validation data, and began at epoch 2.
    result = run(tmp_path / "second", *args, "tables=1", "exit=3", ps=1, exit_code=3)
    assert "training goes on after batch 2 of epoch 3" in result.logs["worker-0"]
    assert "call 1 of `fit` with the backup" in result.logs["worker-0"]
    assert "between: 160" in result.logs["worker-1"]
    for name in WORKERS:
        log = result.logs[name]
        assert "batch 12." not in log
        ending = re.search(r"end iterations=30 off=(\S+)", log)
        assert ending and float(ending[1]) < 1e-6, result.tails(40)
        assert "keys missing=0 " in log and log.count("count=30\n") == ("own=1" in more)
        # No table has passed through a worker, neither one that was written nor one that was read.
        assert log.count("whole tables: []") == 2
        assert "loaded off=0.0e+00" in log
    files = TableFiles(tmp_path / "tables")
    assert files.names == ["embedding/embeddings", "keys/table"]
    assert files.shape(files.names[0]) == (40, 4) and files.slots(files.names[0]) == 1
    assert np.all(files.read(files.names[0]) < 0)


@pytest.mark.extended
def test_rows_in_16_bits_resume_with_the_bits_of_one_process(tmp_path):
    args = (30, tmp_path, "backup=4", "momentum=0.5", "half=1")
    check_names_lost_server(run(tmp_path / "first", *args, "die=ps-1:4", exit_code=None))
    # With one server in the place of two.
    log = run(tmp_path / "second", *args, ps=1).logs["worker-0"]
    assert "training goes on after batch" in log, log
    ending = re.search(r"halves off=0.0e\+00 rounded=(\S+)", log)
    assert ending and 0 < float(ending[1]) < 0.02, log


def that_fails(*options, failure_grace):
    """How a job ends that does not get to its last step."""
    kwargs = {"workers": 2, "ps": 1, "expect_failure": True, "failure_grace": failure_grace}
    return run_in_processes(JOB, 20, "-", *options, **kwargs)


@pytest.mark.extended
def test_an_id_out_of_range_is_named():
    # By the step that asks for it, not by the one before, which looks ahead.
    result = that_fails("bad_id=1", "prefetch=1", failure_grace=60)
    message = "ValueError: The layer embedding was asked for a row that its table does not have: "
    assert message + "ids go from 0 to 39. Received: id 43" in result.logs["worker-1"]
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
def test_a_server_that_hangs_is_named(tmp_path):
    with cluster(tmp_path, 40, tmp_path, "pause=0.1", "timeout=8") as job:
        wait_for((job.log_path("worker-0"), "batch 5."), seconds=120)
        os.kill(job.pids["ps-0"], signal.SIGSTOP)
        try:
            # The worker that gives up first names it alone; the other one may name both.
            logs = [job.log_path(name) for name in WORKERS]
            texts = "PeerLostError: ps-0", "no answer in time"
            wait_for(lambda: any(all(t in log.read_text() for t in texts) for log in logs))
        finally:
            os.kill(job.pids["ps-0"], signal.SIGCONT)
        codes = job.wait(60).exit_codes
        assert [codes["worker-0"], codes["worker-1"]] == [1, 1]


@pytest.mark.extended
def test_a_backup_of_which_a_server_has_lost_rows_is_passed_over(tmp_path):
    args = (30, tmp_path, "backup=5", "accumulate=3", "double=1")

    def trained(name):
        log = run(tmp_path / name, *args, ps=1).logs["worker-0"]
        return re.search("^weights .*$", log, re.M)[0], log

    whole, _ = trained("first")
    backup = tmp_path / "backup"
    stem = json.loads((backup / latest(str(backup))[0] / "tables.json").read_text())["stem"]
    (path,) = backup.glob(f"{stem}-0-of-1.data-00000-*")
    flip(path)
    resumed, log = trained("second")
    assert "training goes on after batch 5 of epoch 2" in log, log
    assert re.search("resumes from the one before, at epoch 2. Received: ps-0 .*cannot read", log)
    assert "are lost" not in log
    assert resumed == whole


@pytest.mark.extended
def test_an_asynchronous_job_goes_on_with_a_server_that_was_started_again(tmp_path):
    args = (40, tmp_path, "sync=0", "backup=10", "pause=0.1", "timeout=120")
    # As under `keras-psplus run --restart task --max_restarts 1`.
    with cluster(tmp_path / "logs", *args, task_restarts=1, server_restarts=True) as job:
        log = job.log_path("worker-0")
        wait_for((log, "batch 1."), seconds=120)
        for task in job.tasks:
            if task.config.task_type == "ps":
                stranger.attack(task.config.address, str(tmp_path / "his"), dim=4)
        wait_for((log, "batch 13."), seconds=120)
        os.kill(job.pids["ps-1"], signal.SIGKILL)
        result = job.wait(120)
        text = log.read_text()
    assert result.exit_code == 0, result.tails(40)
    assert result.task_restarts == 1
    told = re.search(
        r"ps-1 \(127.0.0.1:\d+\) was started again, and goes on with its rows of the tables as "
        r"they were after batch \d+ of epoch \d. .*: (\d+) updates of embedding",
        text,
    )
    assert told, text
    assert not (tmp_path / "his").exists()
    # It has ended well, and nobody needs them.
    assert not [path for path in tmp_path.iterdir() if "backup" in path.name]
    # At each step, each worker sends this server two rows.
    ending = re.search(r"end iterations=40 off=\S+ missing=(\d+)", text)
    assert ending and int(ending[1]) == 2 * int(told[1]) > 0, text
    missing = re.search(r"keys missing=(\d+) uneven=0.0e\+00", text)
    assert missing and 0 < int(missing[1]) < 320, text


@pytest.mark.extended
def test_copies_of_a_job_that_was_killed_are_not_too_old(tmp_path):
    args = (60, tmp_path, "backup=epoch", "cache=16:12")
    for number, (victim, batch) in enumerate((("ps-1", 25), ("worker-1", 45))):
        with cluster(tmp_path / f"{number}", *args, "pause=0.1") as job:
            wait_for((job.log_path("worker-0"), f"batch {batch}."), seconds=120)
            os.kill(job.pids[victim], signal.SIGKILL)
            result = job.wait(90)
        assert not result.timed_out and result.exit_code != 0, result.tails(40)
        if victim == "ps-1":
            check_names_lost_server(result)
    result = run(tmp_path / "last", *args)
    # Gradients that waited at an epoch's end are in the backup; each counts once.
    assert "end iterations=60 off=0.0e+00" in result.logs["worker-0"], result.tails(40)
    logs = list(tmp_path.glob("reads-worker-*"))
    assert len(logs) == 6
    used = 0
    for path in logs:
        lines = [line.split() for line in path.read_text().splitlines() if line.count(" ") == 2]
        found = ages((row, int(now), is_read == "1") for now, row, is_read in lines)
        used += len(found)
        assert max(found, default=0) <= 12
    assert used > 50
