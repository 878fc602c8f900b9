"""Pipelines of real processes: a chief, and a worker for each stage."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.processes import LocalCluster
from keras_psplus.cluster.testing import run_in_processes
from tests.parameter_server.waiting import wait_for

JOB = pathlib.Path(__file__).with_name("training_job.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


ARGUMENTS = ("--stages", "patterns", "--backup", "--epochs", "4", "--heartbeat", "8")
PIPEDREAM = ("--schedule", "pipedream")


def train(folder, *args):
    return run_in_processes(
        JOB, workers=2, chief=True, timeout=560, env=ENVIRONMENT, args=[folder, *args]
    ).logs["chief-0"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder and the log of a job that nothing befalls."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, train(folder, *ARGUMENTS, *PIPEDREAM, "--writes")


def on_worker(log, part):
    """Numbers of the workers that have the variables with a part of a name."""
    found = re.findall(rf"^\S*{part}\S* is on /job:worker/replica:0/task:(\d)", log, re.MULTILINE)
    assert found, log
    return {int(number) for number in found}


def check_places(folder, log, expected):
    for part, workers in expected.items():
        assert on_worker(log, part) == workers
    assert " is on /job:chief" not in log
    # What one process reads is what the stages had.
    model = keras.models.load_model(folder / "model.keras")
    assert model.predict(np.zeros((4, 6), "int32"), verbose=0).shape == (4, 3)


def test_variables_and_slots_are_on_the_stage_of_their_pattern(uninterrupted):
    check_places(*uninterrupted, {"embedding": {0}, "recurrent": {0}, "dense": {1}})


@pytest.fixture(scope="module")
def in_contexts(tmp_path_factory):
    """The folder and the log of a job whose stages are contexts."""
    folder = tmp_path_factory.mktemp("in_contexts")
    return folder, train(folder, "--stages", "contexts", "--writes")


def test_variables_and_slots_are_on_the_stage_of_their_context(in_contexts):
    # Layers that are made outside of contexts are on the stage of the layer before.
    check_places(*in_contexts, {"embedding": {1}, "recurrent": {0}, "dense": {0}})


@pytest.mark.parametrize("job", ["in_contexts", "uninterrupted"])
def test_what_a_callback_writes_is_there_in_the_next_step(job, request):
    """The workers are still computing it when the step begins, by one schedule or the other."""
    assert "what was written is right" in request.getfixturevalue(job)[1]


def weights_of(log):
    return re.search(r"^weights (\w+)$", log, re.MULTILINE)[1]


def check_that_a_lost_stage_is_named(fault, folder, *arguments):
    command = [sys.executable, str(JOB), str(folder), *arguments, "--pause", "0.1"]
    # The chief has to end by itself; a worker that hangs never does.
    grace = 60 if fault == signal.SIGKILL else 2
    with LocalCluster(
        command, workers=2, chief=True, env=ENVIRONMENT, log_dir=folder, failure_grace=grace
    ) as cluster:
        wait_for(cluster.log_path("chief-0"), "step 12\n")
        os.kill(cluster.pids["worker-1"], fault)
        result = cluster.wait(timeout=60)
    log = result.logs["chief-0"]
    assert result.exit_codes["chief-0"] == 1, log
    assert re.search(
        r"worker-1 \(127\.0\.0\.1:\d+\), which has stage 1 \(layers: dense .. dense_1 \(3\)\), "
        r"stopped answering.*Received: ",
        log,
    ), log


def test_a_killed_stage_ends_the_job_and_the_backup_resumes_it(uninterrupted, tmp_path):
    check_that_a_lost_stage_is_named(signal.SIGKILL, tmp_path, *ARGUMENTS, *PIPEDREAM)
    again = train(tmp_path, *ARGUMENTS, *PIPEDREAM)
    assert "step 12\n" not in again
    assert weights_of(again) == weights_of(uninterrupted[1])


# `test_pipelines.py` resumes under this schedule.
def test_a_hanging_stage_ends_the_job(tmp_path):
    check_that_a_lost_stage_is_named(signal.SIGSTOP, tmp_path, *ARGUMENTS, "--schedule", "gpipe")


def test_activations_in_fewer_bytes_learn_the_digits_as_well():
    done = subprocess.run(
        [sys.executable, str(JOB.with_name("compression_job.py"))],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path(os.environ)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    found = re.findall(r"^(None|bf16|int8) (\S+) (\S+)$", done.stdout, re.MULTILINE)
    exact, *others = ((float(loss), float(accuracy)) for _, loss, accuracy in found)
    assert exact[1] > 0.85
    assert len(others) == 2
    for loss, accuracy in others:
        # Something was lost, and it does not show in what has been learned.
        assert loss != exact[0]
        assert loss == pytest.approx(exact[0], rel=0.15)
        assert accuracy > exact[1] - 0.0101
