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
from keras_psplus.catalogue import lookup
from keras_psplus.cli.flags import combinations
from keras_psplus.cli.flags.parsing import UsageError
from keras_psplus.cluster.processes import LocalCluster
from keras_psplus.compression import Compressor
from keras_psplus.pipeline.base import batch_parts
from tests.pipeline import models
from tests.pipeline.models import CROSSENTROPY, X, Y, check_equal, layers, train, wide
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


ARGUMENTS = ["--stages", "patterns", "--pipelines", "2", "--compression", "sign", "--backup"]


@pytest.mark.extended
def test_a_lost_worker_is_named_and_residuals_resume(tmp_path):
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
    files = list((tmp_path / "backup").rglob("2-pipelines-step-*.zip"))
    assert files
    again = run(tmp_path)
    assert "step 12\n" not in again
    assert result_of(again) == result_of(log) != []


class Whole(Compressor):
    """Loses nothing, and counts what it keeps."""

    def init(self, shape, dtype):
        return {"count": tf.zeros([], tf.int64), "last": tf.zeros(shape, dtype)}

    def encode(self, tensor, state, step):
        return (tf.reshape(tensor, [-1]),), {"count": state["count"] + 1, "last": tensor}

    def decode(self, payload, shape, dtype, step):
        return tf.reshape(payload[0], shape)

    def wire_bytes(self, shape, dtype, step=None):
        return tf.TensorShape(shape).num_elements() * 4


def test_what_is_sent_without_loss_equals_plain_keras(pipeline):
    def optimizer():
        return keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=8.0, dynamic_growth_steps=3
        )

    def make():
        return wide(optimizer())

    strategy = pipeline(pipelines=2, microbatches=2, schedule="1f1b", compression=Whole())
    found = in_pipelines(strategy, make)
    check_equal(found, alone(make))
    kept = strategy.state_dict(found[0].optimizer)
    # One of two pipelines sends the gradient of each weight, four times in each epoch.
    counts = {name: count for name, count in kept.items() if name.endswith("/count")}
    assert len(counts) == len(kept) / 2 == 6
    assert {int(count) for count in counts.values()} == {8}


class Adversarial(keras.Model):
    """Gradients by one part pass through the other, whose gradients nobody asks for."""

    def __init__(self):
        super().__init__()
        self.made = layers.Dense(48, name="made")
        self.judged = keras.Sequential([layers.Dense(48), layers.Dense(3)], name="judged")

    def call(self, x):
        return self.judged(self.made(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.made.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


def test_gradients_that_nobody_asks_for_leave_no_residual(pipeline):
    strategy = pipeline(pipelines=2, microbatches=2, compression=Whole())
    with strategy.scope():
        model = Adversarial()
        model.compile(keras.optimizers.SGD(0.1), CROSSENTROPY)
    model.fit(X, Y, batch_size=16, verbose=0)
    names = strategy.state_dict(model.optimizer)
    assert names and all("made" in name for name in names)


def test_residuals_are_saved_and_loaded(pipeline):
    strategy = pipeline(pipelines=2, microbatches=2, compression="sign")
    model, *_ = in_pipelines(strategy)
    weights = model.get_weights()
    state = strategy.state_dict(model.optimizer)
    assert {name.split("/")[0] for name in state} == {"pipeline-0-of-2", "pipeline-1-of-2"}

    def go_on():
        model.set_weights(weights)
        return model.fit(X, Y, batch_size=50, epochs=2, verbose=0, shuffle=False).history["loss"]

    losses = go_on()
    assert go_on() != losses
    strategy.load_state_dict(model.optimizer, state)
    assert go_on() == losses
    name, *_ = state
    with pytest.raises(ValueError, match=f"it has nothing for {name.partition('/')[2]}"):
        strategy.load_state_dict(model.optimizer, {n: a for n, a in state.items() if n != name})
    with pytest.raises(ValueError, match=r"has the shape .* Received: a state with "):
        strategy.load_state_dict(model.optimizer, {**state, name: state[name][:1]})
    with pytest.raises(ValueError, match="was made outside the strategy's scope"):
        strategy.load_state_dict(keras.optimizers.SGD(), state)


def test_tensors_are_cut_for_the_micro_batches_of_each_pipeline():
    parts = batch_parts.cut((tf.range(7), tf.constant(1)), count=2, pipelines=2)
    assert parts.rows == 7
    rows, scalar = parts.leaves
    # Of seven rows, micro-batches have 2, 2, 2 and 1.
    assert [part.numpy().tolist() for part in rows] == [[0, 1, 4, 5], [2, 3, 6]]
    assert scalar.numpy() == 1
    # One row is for one pipeline.
    assert len(batch_parts.cut(tf.range(1), count=2, pipelines=2).leaves[0]) == 1
    assert batch_parts.cut(tf.constant(1), count=2, pipelines=2) is None


def test_the_launcher_knows_pipelines(tmp_path):
    path = tmp_path / "two.py"
    path.write_text(
        "import keras_psplus\n\n"
        "def strategy(**options):\n"
        "    return keras_psplus.PipelineStrategy(pipelines=2, **options)\n"
    )
    layout = {"workers": 4, "ps": 0, "chief": True}
    combinations.check_combination(str(path), layout, {"compression": "int8"})
    with pytest.raises(UsageError, match="has 2 pipelines.*pass --workers 2 or 4.*Received: "):
        combinations.check_combination(str(path), {**layout, "workers": 3}, {})
    with pytest.raises(UsageError, match="has no `updates`"):
        combinations.check_combination(str(path), layout, {"updates": "accumulate:2"})
    with pytest.raises(UsageError, match="has one pipeline, which sends no gradients"):
        combinations.check_combination("pipeline", layout, {"compression": "int8"})
    assert "pipeline" in lookup.names()
