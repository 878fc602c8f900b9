"""A job that is started again goes on at the very step of its last backup."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from keras_psplus.cluster.testing import run_in_processes
from tests.selection import cases

JOB = pathlib.Path(__file__).with_name("steps_job.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
CLUSTER = [
    "arrays",
    "dataset that goes on",
    "dataset of unknown length",
    "PyDataset",
    "Grain",
    "own train_step",
]
ALONE = ["epochs", "at the end of an epoch", "Grain", "own train_step"]
ALONE_LOOK = (
    "test_one_replica_resumes_as_if_nothing_had_happened",
    "test_a_kill_while_the_thread_writes_leaves_the_backup_before",
    "test_backups_that_cannot_be_are_refused",
)


def lines_of(log):
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("[")]
    return {name: found for name, *found in lines}


@pytest.fixture(scope="module")
def cluster(request, tmp_path_factory):
    """By worker and case: whether it was broken off, what differs, and all that came of it."""
    folder = tmp_path_factory.mktemp("steps")
    functions = (
        "test_workers_resume_as_if_nothing_had_happened",
        "test_a_job_whose_worker_is_killed_resumes_at_the_step",
    )
    wanted = cases(request, *functions, argument="name")
    logs = run_in_processes(JOB, workers=2, args=[folder, *wanted], env=ENVIRONMENT, timeout=560)
    return {task: lines_of(log) for task, log in logs.logs.items()}


@pytest.mark.parametrize("name", CLUSTER)
def test_workers_resume_as_if_nothing_had_happened(cluster, name):
    for found in cluster.values():
        broken_off, differing, _ = found[name]
        assert broken_off and not differing


def run_alone(*args):
    """The job in one process without a cluster."""
    return subprocess.run(
        [sys.executable, str(JOB), *map(str, args)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )


@pytest.fixture(scope="module")
def alone(request, tmp_path_factory):
    """The same as of the cluster."""
    wanted = cases(request, *ALONE_LOOK, argument="name")
    done = run_alone(tmp_path_factory.mktemp("alone"), "refused", *wanted)
    assert done.returncode == 0, done.stderr[-4000:]
    return lines_of(done.stdout)


@pytest.mark.parametrize("name", ALONE)
def test_one_replica_resumes_as_if_nothing_had_happened(alone, name):
    broken_off, differing, _ = alone[name]
    assert broken_off and not differing


@pytest.mark.cases("epochs")
def test_a_kill_while_the_thread_writes_leaves_the_backup_before(alone, tmp_path):
    # The sixth backup is one of 18 batches.
    killed = run_alone(tmp_path, "dies in a write")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-4000:]
    assert killed.stdout == "trains on\n"
    backup = tmp_path / "alone" / "dies in a write"
    assert (backup / "writing").is_dir()
    resumed = run_alone(tmp_path, "dies in a write")
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert "training goes on after batch 1 of epoch 3" in resumed.stderr
    found = json.loads(resumed.stdout)[1:]
    assert found == alone["epochs"][2]


@pytest.mark.cases("epochs")
def test_backups_that_cannot_be_are_refused(alone):
    frequency, folder, model, optimizer, batch_size = alone["refused"]
    assert frequency.endswith("at least 1. Received: save_freq=-1")
    assert "file/backup" in folder and "Received: " in folder
    assert "The backup is one of another model" in model
    assert model.endswith(
        "Received: [[1, 3], 'float32'] in the model, [[1, 2], 'float32'] in the backup"
    )
    assert "The backup is one of another model, or of one that was compiled otherwise" in optimizer
    assert optimizer.endswith(
        "Received: RMSprop 'optimizer' in the model, SGD 'optimizer' in the backup"
    )
    assert "and the data come in other batches now" in batch_size
    assert "batch_size=4 for 2" in batch_size and batch_size.endswith(" in the backup")


def run(folder, case, workers, *options):
    """A job under the launcher: its exit code, its log, and what the chief prints at its end."""
    command = [sys.executable, "-m", "keras_psplus", "run", "--workers", str(workers), *options]
    done = subprocess.run(
        [*command, str(JOB), str(folder), case],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    log = done.stdout + done.stderr
    lines = [line.removeprefix("[worker-0] ") for line in log.splitlines()]
    found = [json.loads(line)[1:] for line in lines if line.startswith(f'["{case}", ')]
    return done.returncode, log, dict(found[0]) if found else None


@pytest.mark.cases("arrays")
def test_a_job_whose_worker_is_killed_resumes_at_the_step(cluster, tmp_path):
    options = ["--max_restarts", "1", "--chaos", "kill:worker1@step=20"]
    exit_code, log, found = run(tmp_path, "killed", 2, *options)
    assert exit_code == 0, log[-4000:]
    assert "restart 1 of 1 begins" in log
    # 20 batches are 6 of the third epoch; a backup is made after every third.
    assert "training goes on after batch 4 of epoch 3" in log, log[-4000:]
    assert found == dict(cluster["worker-0"]["arrays"][2])


def test_a_job_goes_on_with_another_number_of_workers(tmp_path):
    whole, changing = tmp_path / "whole", tmp_path / "changing"
    for folder in (whole, changing):
        folder.mkdir()
    exit_code, log, expected = run(whole, "elastic", 2)
    assert exit_code == 0, log[-4000:]
    for workers, step, batch, epoch in ((2, 8, None, 1), (3, 9, 6, 1), (1, None, 1, 3)):
        chaos = ["--chaos", f"kill:worker1@step={step}"] if step else []
        exit_code, log, found = run(changing, "elastic", workers, *chaos)
        assert (exit_code == 0) == (step is None), log[-4000:]
        if batch:
            assert f"training goes on after batch {batch} of epoch {epoch}" in log, log[-4000:]
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        if name != "log":
            np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-5, err_msg=name)
