"""Several pipelines beside one process: on one device, on four, and in real processes."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_psplus as psp
from keras_psplus.catalogue import lookup
from keras_psplus.cli.flags import combinations
from keras_psplus.cli.flags.parsing import UsageError
from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.processes import LocalCluster
from keras_psplus.cluster.testing import run_in_processes
from keras_psplus.compression import Compressor
from keras_psplus.pipeline import arguments, startup
from keras_psplus.pipeline.base import batch_parts
from tests.parameter_server.waiting import wait_for

layers = keras.layers
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RANDOM = np.random.RandomState(0)
X, Y = RANDOM.randn(50, 12).astype("float32"), RANDOM.randint(0, 3, 50)
JOB = pathlib.Path(__file__).with_name("pipelines_job.py")
TRAINING = pathlib.Path(__file__).with_name("training_job.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def pipelines(monkeypatch):
    """Makes a strategy with pipelines of two stages, which share one device."""

    def make(count=2, **options):
        monkeypatch.setattr(startup, "local_devices", lambda: [CPU] * 2 * count)
        return psp.PipelineStrategy(2, pipelines=count, **options)

    return make


def train(strategy, optimizer=keras.optimizers.SGD, epochs=2):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        stack = [layers.Dense(48, activation="tanh") for _ in range(2)]
        model = keras.Sequential([keras.Input((12,)), *stack, layers.Dense(3)])
        model.compile(optimizer(), CROSSENTROPY, metrics=["accuracy"])
    given = {"batch_size": 16, "verbose": 0, "shuffle": False}
    history = model.fit(X, Y, epochs=epochs, **given).history
    return model, history


def check_equal(found, expected):
    for key, values in expected[1].items():
        np.testing.assert_allclose(found[1][key], values, rtol=2e-5, atol=2e-5, err_msg=key)
    for own, other in zip(found[0].get_weights(), expected[0].get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-5, atol=2e-5)


def test_three_pipelines_equal_plain_keras(pipelines):
    with psp.single_process():
        expected = train(tf.distribute.get_strategy(), keras.optimizers.RMSprop)
    # Of the last batch's two rows, one pipeline has none.
    found = train(pipelines(3, schedule="gpipe"), keras.optimizers.RMSprop)
    check_equal(found, expected)


# "dense" is trained by workers.
CASES = {"gpipe": ["recurrent", "tied", "own_step", "frozen"], "1f1b": ["stateful"]}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("schedule", CASES)
def test_four_devices_equal_one_process(schedule):
    done = subprocess.run(
        [sys.executable, str(JOB), schedule, *CASES[schedule]],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path(os.environ)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.findall(r"^(\w+) is equal$", done.stdout, re.MULTILINE) == CASES[schedule]
    assert re.search(r"in 2 stages and 2 pipelines, batches of \d+ rows in 4 micro-b", done.stdout)
    assert re.search(r"^1 +CPU:1, CPU:3 ", done.stdout, re.MULTILINE)


def test_four_workers_equal_one_process():
    log = run_in_processes(
        JOB, workers=4, chief=True, timeout=560, env=ENVIRONMENT, args=["1f1b", "dense", "writes"]
    ).logs["chief-0"]
    assert "dense is equal" in log
    assert "what was written is right" in log
    assert re.search(r"^0 +worker-0, worker-2 ", log, re.MULTILINE)


ARGUMENTS = ["--stages", "patterns", "--pipelines", "2", "--compression", "sign", "--backup"]


def test_a_lost_worker_is_named_and_residuals_resume(tmp_path):
    def result_of(log):
        return re.findall(r"^weights .*$", log, re.MULTILINE)

    def run(folder):
        args = [folder, *ARGUMENTS]
        options = {"workers": 4, "chief": True, "timeout": 150, "env": ENVIRONMENT}
        return run_in_processes(TRAINING, args=args, **options).logs["chief-0"]

    whole = tmp_path / "whole"
    whole.mkdir()
    log = run(whole)
    # Primaries and their slots are on the workers of both pipelines.
    devices = re.findall(r"^\S*(?:kernel|embeddings|momentum)\S* is on \S*task:(\d)", log, re.M)
    assert set(devices) == {"0", "1", "2", "3"}
    command = [sys.executable, str(TRAINING), str(tmp_path), *ARGUMENTS, "--pause", "0.1"]
    with LocalCluster(
        command, workers=4, chief=True, env=ENVIRONMENT, log_dir=tmp_path, failure_grace=60
    ) as cluster:
        wait_for(cluster.log_path("chief-0"), "step 12\n")
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


def test_what_is_sent_without_loss_equals_plain_keras(pipelines):
    def optimizer():
        return keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=8.0, dynamic_growth_steps=3
        )

    with psp.single_process():
        expected = train(tf.distribute.get_strategy(), optimizer)
    strategy = pipelines(schedule="1f1b", compression=Whole())
    found = train(strategy, optimizer)
    check_equal(found, expected)
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


def test_gradients_that_nobody_asks_for_leave_no_residual(pipelines):
    strategy = pipelines(compression=Whole())
    with strategy.scope():
        model = Adversarial()
        model.compile(keras.optimizers.SGD(0.1), CROSSENTROPY)
    model.fit(X, Y, batch_size=16, verbose=0)
    names = strategy.state_dict(model.optimizer)
    assert names and all("made" in name for name in names)


@pytest.fixture(scope="module")
def exact():
    """Losses of training without compression."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup, "local_devices", lambda: [CPU] * 4)
        return train(psp.PipelineStrategy(2, pipelines=2), epochs=4)[1]["loss"]


# Of each family one; "sign" and "int8" are sent elsewhere.
@pytest.mark.parametrize("name", ["bf16", "topk:0.2", "powersgd:2"])
def test_compressors_lose_little(name, pipelines, exact):
    strategy = pipelines(compression=name)
    model, history = train(strategy, epochs=4)
    assert history["loss"][-1] == pytest.approx(exact[-1], rel=0.05)
    assert history["loss"] != exact
    assert bool(strategy.state_dict(model.optimizer)) == (name != "bf16")


def test_residuals_are_saved_and_loaded(pipelines):
    strategy = pipelines(compression="sign")
    model, _ = train(strategy)
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


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pipelines": 0}, "pipelines"),
        ({"pipelines": 1.5}, "pipelines"),
        (
            {"pipelines": 3},
            r"1 workers or devices cannot be divided over 3 pipelines.*start 3 work",
        ),
        ({"compression": "int8"}, "there is one pipeline"),
        ({"pipelines": 2, "compression": "int9"}, "compression"),
        ({"pipelines": 2, "compression": "factors"}, "must have `encode` and `decode`"),
        (
            {"pipelines": 2, "compression": psp.compression.NoCommunication()},
            "a pipeline sends its gradients to another",
        ),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=f"(?s){message}.*Received: "):
        psp.PipelineStrategy(**options)


def test_counts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="start 2 or 4 workers.*Received: pipelines=2"):
        arguments.check_count(None, 3, 2)
    with pytest.raises(ValueError, match="2 stages, and there are 6.*of each of the 2 pipelines"):
        arguments.check_count([["a"], ["b"]], 6, 2)
    arguments.check_count([["a"], ["b"]], 4, 2)


def test_a_cluster_that_does_not_fit_is_refused_on_every_task(monkeypatch):
    cluster = {"chief": ["localhost:1"], "worker": [f"localhost:{i}" for i in (2, 3, 4)]}
    task = {"cluster": cluster, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    with pytest.raises(ValueError, match="3 workers or devices cannot be divided over 2 pipelines"):
        psp.PipelineStrategy(pipelines=2)


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
