"""Several pipelines beside one process: on one device, and in real processes."""

import os
import pathlib
import re
import signal
import sys

import keras
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.cli import flags
from keras_psplus.cli.flags import UsageError
from keras_psplus.cluster.processes import LocalCluster
from keras_psplus.pipeline import microbatches
from tests.pipeline import models
from tests.pipeline.models import check_equal, train, wide
from tests.support.cluster import equals_one_process, makes_scope, strategy_of
from tests.support.jobs import environment, run_in_processes, wait_for

pytestmark = pytest.mark.processes

TRAINING = pathlib.Path(__file__).with_name("training_job.py")


def alone(make, **options):
    with psp.single_process():
        return train(tf.distribute.get_strategy(), make, evaluates=False, **options)


def in_pipelines(strategy, make=wide, **options):
    return train(strategy, make, evaluates=False, **options)


@pytest.mark.extended
def test_three_pipelines_equal_plain_keras(pipeline):
    def make():
        return wide(keras.optimizers.RMSprop())

    # Of the last batch's two rows, one pipeline has none.
    strategy = pipeline(pipelines=3, microbatches=2, schedule="gpipe")
    check_equal(in_pipelines(strategy, make), alone(make))


@pytest.mark.extended
def test_two_pipelines_do_what_one_does_of_as_many_micro_batches(pipeline):
    one = in_pipelines(pipeline(microbatches=4), models.spectral)
    two = in_pipelines(pipeline(pipelines=2, microbatches=2), models.spectral)
    check_equal(two, one)


@makes_scope
def on_workers(scope):
    model, history, _ = in_pipelines(strategy_of(scope), models.skips, assigns=True)
    return model, history


@pytest.mark.extended
def test_four_workers_equal_one_process():
    log = equals_one_process("pipelines2x2", on_workers).logs["chief-0"]
    assert re.search(r"^0 +worker-0, worker-2 ", log, re.MULTILINE)


ARGUMENTS = ["--stages", "patterns", "--pipelines", "2", "--compression", "bf16", "--backup"]


@pytest.mark.extended
def test_a_lost_worker_is_named_and_training_resumes(tmp_path):
    def result_of(log):
        return re.findall(r"^weights .*$", log, re.MULTILINE)

    def run(folder):
        options = {"workers": 4, "chief": True, "timeout": 150}
        return run_in_processes(TRAINING, folder, *ARGUMENTS, **options).logs["chief-0"]

    whole = tmp_path / "whole"
    whole.mkdir()
    log = run(whole)
    # Primaries and their slots are on the workers of both pipelines.
    devices = re.findall(r"^\S*(?:kernel|embeddings|momentum)\S* is on \S*task:(\d)", log, re.M)
    assert set(devices) == {"0", "1", "2", "3"}
    command = [sys.executable, str(TRAINING), str(tmp_path), *ARGUMENTS, "--pause", "0.1"]
    with LocalCluster(
        command, workers=4, chief=True, env=environment(), log_dir=tmp_path, failure_grace=60
    ) as cluster:
        wait_for((cluster.log_path("chief-0"), "step 12\n"), 120)
        os.kill(cluster.pids["worker-3"], signal.SIGKILL)
        result = cluster.wait(timeout=60)
    failed = result.logs["chief-0"]
    assert result.exit_codes["chief-0"] == 1, failed
    assert re.search(
        r"worker-3 \(127\.0\.0\.1:\d+\), which has stage 1 of pipeline 1 "
        r"\(layers: dense .. dense_1 \(3\)\), stopped answering.*Received: ",
        failed,
    ), failed
    again = run(tmp_path)
    assert "step 12\n" not in again
    assert result_of(again) == result_of(log) != []


class Clipped(psp.compression.Cast):
    """Loses nothing but what float16 has no room for."""

    def encode_rows(self, values, step):
        return (tf.clip_by_value(values, tf.float16.min, tf.float16.max),)


def scaled_rows():
    scale = {"initial_scale": 2.0**24, "dynamic_growth_steps": 3}
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), **scale)
    return models.ignored_class()._replace(optimizer=optimizer)


def scaled_by_a_constant():
    return wide(keras.optimizers.SGD(0.1, loss_scale_factor=2.0**24))


# With scales by which gradients are too large for float16.
@pytest.mark.parametrize("make", [scaled_rows, scaled_by_a_constant])
def test_gradients_are_cast_without_their_scale(pipeline, make):
    strategy = pipeline(pipelines=2, microbatches=2, schedule="1f1b", compression=Clipped())
    found = in_pipelines(strategy, make)
    check_equal(found, alone(make))
    assert strategy.state_dict(found[0].optimizer) == {}
    with pytest.raises(ValueError, match="keeps nothing from step to step.*Received: state="):
        strategy.load_state_dict(found[0].optimizer, {"replica-0-of-2/0": 0.0})


def test_tensors_are_cut_for_the_micro_batches_of_each_pipeline():
    parts = microbatches.cut_batch((tf.range(7), tf.constant(1)), count=2, pipelines=2)
    assert parts.rows == 7
    rows, scalar = parts.leaves
    # Of seven rows, micro-batches have 2, 2, 2 and 1.
    assert [part.numpy().tolist() for part in rows] == [[0, 1, 4, 5], [2, 3, 6]]
    assert scalar.numpy() == 1
    # One row is for one pipeline.
    assert len(microbatches.cut_batch(tf.range(1), count=2, pipelines=2).leaves[0]) == 1
    assert microbatches.cut_batch(tf.constant(1), count=2, pipelines=2) is None


def test_the_launcher_knows_pipelines():
    layout = {"workers": 4, "ps": 0, "chief": True}
    flags.check_combination("pipeline", layout, {})
    with pytest.raises(UsageError, match="has no `updates`"):
        flags.check_combination("pipeline", layout, {"updates": "accumulate:2"})
    with pytest.raises(UsageError, match="has one pipeline, which sends no gradients"):
        flags.check_combination("pipeline", layout, {"compression": "int8"})
