"""Asynchronous jobs in real processes: no update is lost, failures end or go on as documented."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

import keras_psplus
from keras_psplus.cluster.config import ClusterConfigError
from keras_psplus.cluster.environment import TOKEN_VARIABLE
from keras_psplus.cluster.ports import free_ports
from keras_psplus.cluster.processes import LocalCluster
from keras_psplus.cluster.testing import run_in_processes
from tests.parameter_server.waiting import wait_for

JOB = pathlib.Path(__file__).with_name("counting_job.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


def counts(log):
    found = re.search(r"steps=(\d+) iterations=(\d+) evaluated=(\d+)", log)
    assert found, log[-4000:]
    return [int(n) for n in found.groups()]


def job(tmp_path, *args, workers=2, ps=1, env=None):
    return LocalCluster(
        [sys.executable, str(JOB), *map(str, args)],
        workers=workers,
        ps=ps,
        chief=True,
        # Lets the test meet it half-way.
        env={**ENVIRONMENT, "COUNTING_JOB_PAUSE": "0.02", **(env or {})},
        log_dir=tmp_path,
        # Whoever has to end has to do so by itself.
        failure_grace=70,
    )


def test_no_update_of_three_workers_is_lost():
    result = run_in_processes(
        JOB, workers=3, ps=1, chief=True, timeout=560, env=ENVIRONMENT, args=[600]
    )
    assert counts(result.logs["chief-0"]) == [600, 600, 1200]
    # Nor is a byte that any of them has sent.
    sent = "{'counting/dense/kernel': (9600, 9600), 'counting/dense/bias': (2400, 2400)}"
    assert sent in result.logs["chief-0"]
    for name in ("worker-0", "worker-2", "ps-0"):
        assert result.exit_codes[name] == 0
        assert f"chief-0 has ended, {name} ends" in result.logs[name]


def test_fit_goes_on_without_a_killed_worker_and_with_a_restarted_one(tmp_path):
    state = tmp_path / "state.npz"
    gate = tmp_path / "gate"
    env = {"COUNTING_JOB_COMPRESSION": "int8", "COUNTING_JOB_STATE": str(state)}
    with job(tmp_path, 400, env={**env, "COUNTING_JOB_GATE": str(gate)}) as cluster:
        chief = cluster.log_path("chief-0")
        wait_for(chief, "batch 50\n")
        # A chief of its own address, with the same servers, first without the token.
        described = json.loads(cluster.environment("chief-0")["TF_CONFIG"])
        described["cluster"]["chief"] = [f"127.0.0.1:{free_ports(1)[0]}"]
        for token, message in (("", "token differs"), (None, r"serves another chief: chief-0 \(")):
            second = {**cluster.environment("chief-0"), "TF_CONFIG": json.dumps(described)}
            if token is not None:
                second[TOKEN_VARIABLE] = token
            result = subprocess.run(
                [sys.executable, str(JOB), "400"], env=second, capture_output=True, timeout=60
            )
            errors = result.stderr.decode()
            assert result.returncode == 1, errors
            assert re.search(rf"ClusterStartupError: ps-0 \(127.0.0.1:\d+\).*{message}", errors)
        environment = cluster.environment("worker-1")
        os.kill(cluster.pids["worker-1"], signal.SIGKILL)
        log = tmp_path / "again"
        with log.open("w") as out:
            again = subprocess.Popen(
                [sys.executable, str(JOB), "400"], env=environment, stdout=out, stderr=out
            )
        try:
            # On a busy machine the job would be over before it has started.
            wait_for(log, "worker-1 serves")
            gate.touch()
            wait_for(chief, "worker-1 is back")
            # Whatever comes from now on can only come from the one that was started again.
            os.kill(cluster.pids["worker-0"], signal.SIGKILL)
            wait_for(chief, "evaluated=", seconds=90)
            assert again.wait(30) == 0, log.read_text()
        finally:
            again.kill()
    log = chief.read_text()
    assert re.search(r"worker-1 was lost with batch \d+ .*; worker-0 takes it once more", log), log
    steps, iterations, evaluated = counts(log)
    # The step under way on a worker is sent again, and may have been applied already.
    assert 400 <= steps <= 404
    assert 400 <= iterations <= 404
    assert evaluated == 800
    # What the compressor keeps began anew on the one that came back, if it came in time to train.
    assert "worker-0 cannot be reached: what it has left out of its gradients is not saved" in log
    if "worker-1 is back" in log.split("evaluating")[0]:
        with np.load(state) as saved:
            assert {name.split("/")[0] for name in saved} == {"worker-1-of-2"}


def test_steps_that_overlap_go_on_when_each_worker_is_killed(tmp_path):
    """Several steps are under way when a worker is lost, and when it is taken back."""
    env = {"COUNTING_JOB_OVERLAP": "1", "COUNTING_JOB_PAUSE": "0.005"}
    again = []
    with job(tmp_path, 4000, env=env) as cluster:
        chief = cluster.log_path("chief-0")
        wait_for(chief, "batch 50\n")
        try:
            for number, name in enumerate(("worker-1", "worker-0")):
                os.kill(cluster.pids[name], signal.SIGKILL)
                with (tmp_path / f"again-{number}").open("w") as out:
                    again.append(
                        subprocess.Popen(
                            [sys.executable, str(JOB), "4000"],
                            env=cluster.environment(name),
                            stdout=out,
                            stderr=out,
                        )
                    )
                wait_for(chief, f"{name} is back", seconds=60)
            wait_for(chief, "evaluated=", seconds=90)
            for process in again:
                assert process.wait(30) == 0
        finally:
            for process in again:
                process.kill()
    steps, iterations, evaluated = counts(chief.read_text())
    # Of each worker that was killed, up to three steps are sent again.
    assert 4000 <= steps <= 4006
    assert 4000 <= iterations <= 4006
    assert evaluated == 8000


def test_chief_gives_up_when_all_workers_are_gone(tmp_path):
    with job(tmp_path, 400) as cluster:
        chief = cluster.log_path("chief-0")
        wait_for(chief, "batch 100")
        for name in ("worker-0", "worker-1"):
            os.kill(cluster.pids[name], signal.SIGKILL)
        wait_for(chief, "WorkersLostError: None of the workers", seconds=60)
        assert cluster.wait(60).exit_codes["chief-0"] == 1
    assert "Received: heartbeat_timeout=5" in chief.read_text()


@pytest.mark.parametrize("missing", ["ps", "worker"])
def test_clusters_without_ps_or_workers_are_refused(missing, monkeypatch):
    addresses = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}
    del addresses[missing]
    config = {"cluster": addresses, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ClusterConfigError, match=f"at least one `{missing}` task"):
        keras_psplus.ParameterServerStrategy()


def test_a_workers_error_is_the_users_own_and_told_once():
    script = """
    import keras, numpy as np
    import keras_psplus as psp

    class Lookup(keras.layers.Embedding):
        def call(self, inputs):
            return super().call(inputs)  # a line of the user's own

    strategy = psp.ParameterServerStrategy(startup_timeout=60)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((1,), dtype="int32"), Lookup(10, 2, name="favourites"),
             keras.layers.Flatten(), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    x = np.full((40, 1), 7)
    x[22] = 77
    model.fit(x, x, batch_size=4, verbose=0, shuffle=False)
    """
    result = run_in_processes(
        script, workers=2, ps=1, chief=True, timeout=90, env=ENVIRONMENT, expect_failure=True
    )
    log = result.logs["chief-0"]
    assert "InvalidArgumentError" in log
    assert log.count("77 is not in [0, 10)") == 1
    assert re.search(r"In \S*favourites\S*, run by worker-[01]", log), log[-4000:]
    assert "in call" in log
    assert "Received: batch 5 (counted from 0)" in log
    assert len(log.splitlines()) < 60
