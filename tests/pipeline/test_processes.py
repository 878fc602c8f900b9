"""Pipelines of real processes: a chief, and a worker for each stage."""

import os
import pathlib
import re
import signal
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.cluster.processes import LocalCluster
from tests.pipeline import models, slow_writes
from tests.support import jobs
from tests.support.cluster import equals_one_process, run
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

JOB = pathlib.Path(__file__).with_name("training_job.py")
DIGITS = pathlib.Path(__file__).resolve().parents[2] / "examples" / "digits.npz"
ARGUMENTS = ("--stages", "patterns", "--backup", "--epochs", "4", "--heartbeat", "8")
PIPEDREAM = ("--schedule", "pipedream")


def train(folder, *args):
    options = {"workers": 2, "chief": True, "timeout": 560}
    return jobs.run_in_processes(JOB, folder, *args, **options).logs["chief-0"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The log of a job that nothing befalls."""
    return train(tmp_path_factory.mktemp("uninterrupted"), *ARGUMENTS, *PIPEDREAM)


def check_places(log, expected):
    """Variables with a part of a name are on the workers with some numbers."""
    for part, workers in expected.items():
        pattern = rf"^\S*{part}\S* is on /job:worker/replica:0/task:(\d)"
        assert {int(number) for number in re.findall(pattern, log, re.MULTILINE)} == workers, log
    assert " is on /job:chief" not in log


def in_contexts():
    with psp.stage(1):
        first = keras.layers.Embedding(40, 8, name="embedding")
    with psp.stage(0):
        second = keras.layers.SimpleRNN(16, name="recurrent")
    model = keras.Sequential([first, second, keras.layers.Dense(32, "relu"), keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adam(0.01), models.CROSSENTROPY)
    model.fit(models.TOKENS, models.Y, batch_size=16, verbose=0)
    for variable in [*model.variables, *model.optimizer.variables]:
        print(f"{variable.path} is on {variable.value.device}")


def test_variables_and_slots_are_on_the_stage_of_their_context():
    log = run("pipeline2", in_contexts).logs["chief-0"]
    # Layers that are made outside of contexts are on the stage of the layer before.
    check_places(log, {"embedding": {1}, "recurrent": {0}, "dense": {0}})


@pytest.mark.extended
@pytest.mark.parametrize("layout", ["pipeline2", *extended("pipedream2")])
def test_what_a_callback_writes_is_there_in_the_next_step(layout):
    """The workers are still computing it when the step begins."""
    equals_one_process(layout, slow_writes.written)


def weights_of(log):
    return re.search(r"^weights (\w+)$", log, re.MULTILINE)[1]


def check_that_a_lost_stage_is_named(fault, folder, *arguments):
    command = [sys.executable, str(JOB), str(folder), *arguments, "--pause", "0.1"]
    # The chief has to end by itself; a worker that hangs never does.
    grace = 60 if fault == signal.SIGKILL else 2
    options = {"workers": 2, "chief": True, "log_dir": folder, "failure_grace": grace}
    with LocalCluster(command, env=jobs.environment(), **options) as cluster:
        jobs.wait_for((cluster.log_path("chief-0"), "step 12\n"), 120)
        os.kill(cluster.pids["worker-1"], fault)
        result = cluster.wait(timeout=60)
    log = result.logs["chief-0"]
    assert result.exit_codes["chief-0"] == 1, log
    assert re.search(
        r"worker-1 \(127\.0\.0\.1:\d+\), which has stage 1 \(layers: dense .. dense_1 \(3\)\), "
        r"stopped answering.*Received: ",
        log,
    ), log


# `tests/faults/test_sizes.py` kills a stage as well, and resumes with fewer.
@pytest.mark.extended
def test_a_killed_stage_ends_the_job_and_the_backup_resumes_it(uninterrupted, tmp_path):
    check_that_a_lost_stage_is_named(signal.SIGKILL, tmp_path, *ARGUMENTS, *PIPEDREAM)
    again = train(tmp_path, *ARGUMENTS, *PIPEDREAM)
    assert "step 12\n" not in again
    assert weights_of(again) == weights_of(uninterrupted)


# `test_pipelines.py` resumes under this schedule.
@pytest.mark.extended
def test_a_hanging_stage_ends_the_job(tmp_path):
    check_that_a_lost_stage_is_named(signal.SIGSTOP, tmp_path, *ARGUMENTS, "--schedule", "gpipe")


def learned(strategy):
    """The last loss, and the accuracy on other rows."""
    with np.load(DIGITS) as digits:
        x, y = digits["x"].astype("float32") / digits["x"].max(), digits["y"].astype("int32")
    keras.utils.set_random_seed(7)
    with strategy.scope():
        stack = [keras.layers.Dense(128, activation="relu") for _ in range(3)]
        model = keras.Sequential([*stack, keras.layers.Dense(10)])
        model.compile(keras.optimizers.Adam(0.003), models.CROSSENTROPY, metrics=["accuracy"])
    options = {"batch_size": 60, "epochs": 8, "verbose": 0, "shuffle": False}
    losses = model.fit(x[:1500], y[:1500], **options).history["loss"]
    return losses[-1], model.evaluate(x[1500:], y[1500:], batch_size=60, verbose=0)[1]


@pytest.mark.extended
def test_activations_in_fewer_bytes_learn_the_digits_as_well(pipeline):
    with psp.single_process():
        exact_loss, exact = learned(tf.distribute.get_strategy())
    loss, accuracy = learned(pipeline(microbatches=4, activation_compression="int8"))
    assert exact > 0.85
    # Something was lost, and it does not show in what has been learned.
    assert loss != pytest.approx(exact_loss, rel=1e-5)
    assert loss == pytest.approx(exact_loss, rel=0.15)
    assert accuracy > exact - 0.0101
