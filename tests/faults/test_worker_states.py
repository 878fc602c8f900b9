"""What workers keep beside BackupAndRestore's model: of one state on all, whoever is killed."""

import json
import pathlib

import pytest

from tests.faults import kill_sweep
from tests.support.jobs import run_in_processes

pytestmark = pytest.mark.processes
JOB = pathlib.Path(__file__).with_name("worker_states_job.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """By what was done: what each worker prints; and the workers' logs."""
    logs = run_in_processes(JOB, tmp_path_factory.mktemp("states"), workers=2).logs
    found = {}
    for log in logs.values():
        for line in log.splitlines():
            if line.startswith("["):
                what, epochs, ending = json.loads(line)
                found.setdefault(what, []).append((epochs, ending))
    return found, logs["worker-0"]


def test_all_workers_resume_from_the_state_that_is_whole_on_all_of_them(run):
    found, log = run
    ((_, whole), *_) = found["whole"]
    # What worker 1 had kept of the last one is damaged; with the one before, nothing is lost.
    assert found["other worker"] == [([0, 1, 2, 3], whole)] * 2
    assert "training resumes from the one before, at epoch 2. Received: " in log
    assert "are lost" not in log.split('["all"')[0]
    # One of Keras itself is taken without what workers had kept; all are told so.
    ((epochs, weights), other) = found["of Keras"]
    assert epochs[-1] == 3 and other == (epochs, weights) and weights != whole
    assert "are lost: it has no files of workers" in log


def test_all_workers_refuse_a_damaged_state(run):
    ((epochs, first), other) = run[0]["all"]
    assert epochs is None and other == (epochs, first)
    assert "is damaged or incomplete" in first
    assert first.count("latest.weights.h5 is not as it was written") == 2


def test_a_worker_that_cannot_write_is_named_on_all(run):
    ((epochs, first), other) = run[0]["full"]
    assert epochs is None
    for error in (first, other[1]):
        assert "BackupAndRestore's state could not be written to" in error
        assert "Received: worker-1 cannot write to " in error


# `python tests/faults/kill_sweep.py KIND` has any number of points.
@pytest.mark.extended
def test_a_worker_killed_while_it_saves_loses_nothing(tmp_path):
    # Before it has written what it keeps for the second time.
    points, said = [("worker-1", "worker-1", 14)], []
    assert not kill_sweep.sweep("diloco", points, tmp_path, epochs=3, log=said.append), said
    assert "killed=True" in said[0] and "epochs from 1 on" in said[1], said
