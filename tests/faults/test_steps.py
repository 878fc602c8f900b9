"""A job that is started again goes on at the very step of its last backup."""

import json
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.selection import cases
from tests.support.jobs import environment, run_in_processes, run_script
from tests.support.tiers import extended

pytestmark = pytest.mark.processes
JOB = pathlib.Path(__file__).with_name("steps_job.py")
# A job that is killed and resumes with another number of workers is in test_sizes.py.
CLUSTER = extended("dataset of unknown length", "PyDataset", "Grain", "own train_step")
ALONE = ["epochs", "own train_step", *extended("at the end of an epoch")]
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
    function = "test_workers_resume_as_if_nothing_had_happened"
    wanted = cases(request, function, argument="name")
    logs = run_in_processes(JOB, tmp_path_factory.mktemp("steps"), *wanted, workers=2)
    return {task: lines_of(log) for task, log in logs.logs.items()}


@pytest.mark.parametrize("name", CLUSTER)
def test_workers_resume_as_if_nothing_had_happened(cluster, name):
    for found in cluster.values():
        broken_off, differing, _ = found[name]
        assert broken_off and not differing


@pytest.fixture(scope="module")
def alone(request, tmp_path_factory):
    """The same of one process without a cluster."""
    wanted = cases(request, *ALONE_LOOK, argument="name")
    return lines_of(run_script(JOB, tmp_path_factory.mktemp("alone"), "refused", *wanted))


@pytest.mark.parametrize("name", ALONE)
def test_one_replica_resumes_as_if_nothing_had_happened(alone, name):
    broken_off, differing, _ = alone[name]
    assert broken_off and not differing


@pytest.mark.extended
@pytest.mark.cases("epochs")
def test_a_kill_while_the_thread_writes_leaves_the_backup_before(alone, tmp_path):
    # The sixth backup is one of 18 batches.
    command = [sys.executable, str(JOB), str(tmp_path), "dies in a write"]
    killed = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "trains on\n")
    backup = tmp_path / "alone" / "dies in a write"
    begun, whole = sorted(
        backup.glob("backup-*"), key=lambda path: (path / "manifest.json").exists()
    )
    assert (backup / "LATEST").read_text() == f"{whole.name}\n" and list(begun.iterdir())
    log = run_script(JOB, tmp_path, "dies in a write")
    assert "training goes on after batch 1 of epoch 3" in log
    assert lines_of(log)["dies in a write"] == alone["epochs"][2]


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
