"""A worker that fails ends the job in a bounded time, and the others say which one it was."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import keras_psplus
from keras_psplus.cluster.config import ClusterConfigError
from keras_psplus.cluster.processes import LocalCluster
from tests.support.jobs import environment, launch, run_in_processes, wait_for
from tests.support.tiers import extended

SOURCE = pathlib.Path(__file__).with_name("failing_job.py")
# The bound is 60 s after the failure; start-up on a busy machine is not part of it.
LIMIT = 100


def run_job(how, victim=1, step=25, workers=2):
    # The launcher's own grace is made long: the workers have to end by themselves.
    return run_in_processes(
        SOURCE,
        *(how, victim, step),
        workers=workers,
        timeout=LIMIT,
        expect_failure=True,
        failure_grace=60,
    )


def assert_survivors_name(result, victim, survivors):
    for survivor in survivors:
        log = result.logs[survivor]
        assert result.exit_codes[survivor] not in (0, None), log[-3000:]
        assert result.exit_codes[survivor] > 0, log[-3000:]
        assert f"PeerLostError: {victim} (127.0.0.1:" in log, log[-3000:]
        assert "Received: " in log
        assert "trained to the end" not in log


@pytest.mark.extended
@pytest.mark.processes
def test_two_survivors_name_a_worker_that_was_killed_at_the_end_of_an_epoch():
    result = run_job("kill", victim=2, step=30, workers=3)
    assert result.exit_codes["worker-2"] == -signal.SIGKILL
    assert_survivors_name(result, "worker-2", ["worker-0", "worker-1"])


@pytest.mark.processes
def test_worker_that_raises_shows_its_own_error():
    result = run_job("raise")
    assert "ArithmeticError: the victim's own error" in result.logs["worker-1"]
    assert_survivors_name(result, "worker-1", ["worker-0"])
    assert "Received: ArithmeticError: the victim's own error" in result.logs["worker-0"]
    assert "has ended by an error" in result.logs["worker-0"]


@pytest.mark.processes
def test_leader_that_raises_while_the_other_waits_outside_of_a_step():
    result = run_job("raise early", victim=0)
    assert_survivors_name(result, "worker-0", ["worker-1"])
    assert "Received: ArithmeticError: the victim's own error" in result.logs["worker-1"]
    assert result.first_failure == "worker-0"


@pytest.mark.extended
@pytest.mark.processes
def test_worker_that_leaves_in_the_middle():
    assert_survivors_name(run_job("leave"), "worker-1", ["worker-0"])


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_what_the_chief_alone_calls(tmp_path, call):
    script = tmp_path / "train.py"
    script.write_text(
        "import keras\n"
        "import numpy as np\n"
        "import keras_psplus as psp\n"
        "strategy = psp.strategy_from_env()\n"
        "with strategy.scope():\n"
        "    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])\n"
        "    model.compile('sgd', 'mse')\n"
        "x = np.ones((64, 4))\n"
        "if strategy.is_chief:\n"
        f"    model.{call}(x, x[:, :1], batch_size=16, verbose=0)\n"
    )
    output = launch("--workers=2", script, exit_code=1, timeout=LIMIT)
    assert (
        "worker-1: the script had ended there with exit code 0, while worker-0 still trained. All "
        "workers call fit, evaluate and predict; "
    ) in output


@pytest.mark.processes
@pytest.mark.parametrize(
    "how, victim",
    [("stop and evaluate", 1), *extended(("stop between averages", 1))],
)
def test_worker_that_stops_training_alone_within_an_epoch(how, victim):
    result = run_job(how, victim)
    for name, log in result.logs.items():
        assert result.exit_codes[name] == 1, log[-3000:]
        assert (
            f"ValueError: Workers have fallen out of step: worker-{victim} has stopped training "
            f"after batch 5 of epoch 3, worker-{1 - victim} is at training step 26. "
        ) in log, log[-3000:]
        assert f"Received: stop_training=True on worker-{victim} alone" in log


@pytest.mark.extended
@pytest.mark.processes
@pytest.mark.parametrize("victim, step", [(0, 25), (1, 30)])
def test_hanging_worker(victim, step, tmp_path):
    """A stopped process still accepts connections; only that it says nothing tells.

    It is waited for up to `heartbeat_timeout`, 8 s here, also between two epochs: it goes on after
    5.5 s, and then hangs for good. TensorFlow's own heartbeats would take half a minute.
    """
    command = [sys.executable, str(SOURCE), "hang", str(victim), str(step)]
    survivor = f"worker-{1 - victim}"
    with LocalCluster(command, workers=2, env=environment(), log_dir=tmp_path) as cluster:
        log = cluster.log_path(f"worker-{victim}")
        wait_for((log, "failing now"), LIMIT)
        time.sleep(5.5)
        cluster.send_signal(f"worker-{victim}", signal.SIGCONT)
        wait_for(lambda: log.read_text().count("failing now") == 2, LIMIT)
        log = cluster.log_path(survivor)
        wait_for((log, f"PeerLostError: worker-{victim} (127.0.0.1:"), 21)
        wait_for((log, "ends with exit code 1"), LIMIT)


@pytest.mark.processes
def test_unequal_models_name_the_first_differing_variable():
    result = run_job("other shape")
    for name, log in result.logs.items():
        assert result.exit_codes[name] > 0
        assert "ValueError: Workers have fallen out of step" in log, log[-3000:]
        assert "first/kernel (shape=(8, 5)" in log
        assert "Received: " in log


def cluster_of(**addresses):
    """A `TF_CONFIG` of a worker that is alone so far."""
    return json.dumps({"cluster": addresses, "task": {"type": "worker", "index": 0}})


@pytest.mark.processes
def test_early_initialisation_is_named(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import keras_psplus\n"
        "import tensorflow as tf\n"
        "tf.constant([1.0]) + 1  # the culprit\n"
        "keras_psplus.MultiWorkerMirroredStrategy(startup_timeout=30)\n"
    )
    env = environment(TF_CONFIG=cluster_of(worker=["127.0.0.1:1", "127.0.0.1:2"]))
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 1
    assert "# the culprit" in done.stderr
    assert "Collective ops must be configured at program startup" not in done.stderr


def test_ps_tasks_are_refused(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", cluster_of(worker=["127.0.0.1:1"], ps=["127.0.0.1:2"]))
    with pytest.raises(ClusterConfigError, match="has no use for `ps` tasks.*Received: "):
        keras_psplus.MultiWorkerMirroredStrategy(startup_timeout=30)


@pytest.mark.processes
def test_a_port_in_use_is_named():
    script = """
    import json, os, socket
    config = json.loads(os.environ["TF_CONFIG"])
    if config["task"]["index"] == 0:
        host, port = config["cluster"]["worker"][0].split(":")
        holder = socket.socket()
        holder.bind((host, int(port)))
        holder.listen()
    import keras_psplus
    keras_psplus.MultiWorkerMirroredStrategy(startup_timeout=5)
    """
    result = run_in_processes(script, workers=2, timeout=60, expect_failure=True)
    assert "uses the port" in result.logs["worker-0"]
