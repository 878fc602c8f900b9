import socket

import pytest

from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.testing import run_in_processes

TASKS = """
import json, os, sys, time
from keras_psplus.cluster.config import read_task_config
from keras_psplus.cluster.startup.preflight import wait_for_cluster
config = read_task_config()
if config.task_type == "chief":
    import tensorflow as tf
    wait_for_cluster(config, ("ps",), timeout=60)  # seen by the ps, but not yet TensorFlow
    time.sleep(1)
    server = tf.distribute.Server(dict((k, list(v)) for k, v in config.cluster.items()), "chief", 0)
    time.sleep(1.5)
    print("chief ends", flush=True)
    os._exit(0)
else:
    from keras_psplus.cli.main import main
    sys.exit(main(["serve", "--chief_gone=1.5", "--startup_timeout=60"]))
"""


def test_ps_serves_until_the_chief_has_ended():
    result = run_in_processes(TASKS, workers=0, chief=True, ps=1, timeout=560)
    assert "chief ends" in result.logs["chief-0"]
    assert "ps-0 serves on 127.0.0.1" in result.logs["ps-0"]
    assert "chief-0 has ended, ps-0 ends" in result.logs["ps-0"]
    assert result.exit_codes["ps-0"] == 0 and not result.terminated


GREETED = """
import os, sys, time
from keras_psplus.cluster.config import read_task_config
from keras_psplus.cluster.startup.preflight import wait_for_cluster
config = read_task_config()
if config.task_type == "chief":
    import tensorflow as tf
    from keras_psplus.cluster.serving.shutdown import ShutdownNotifier
    wait_for_cluster(config, ("ps",), timeout=60)
    cluster = {job: list(tasks) for job, tasks in config.cluster.items()}
    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec(cluster), job_name="chief", protocol="grpc"
    )
    ShutdownNotifier({"ps-0": config.cluster["ps"][0]})
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
    if sys.argv[1] == "raises":
        raise ValueError("the script's own")
else:
    from keras_psplus.cli.main import main
    # One that has taken leave is not waited for.
    seconds = 60 if sys.argv[1] == "well" else 1.5
    sys.exit(main(["serve", f"--chief_gone={seconds}", "--startup_timeout=60"]))
"""


@pytest.mark.parametrize(("end", "code"), [("well", 0), ("killed", 1), ("raises", 1)])
def test_a_ps_knows_whether_its_chief_ended_well(end, code):
    result = run_in_processes(
        GREETED,
        workers=0,
        chief=True,
        ps=1,
        timeout=560,
        args=[end],
        expect_failure=bool(code),
        failure_grace=60,
    )
    assert result.exit_codes["ps-0"] == code
    assert ("has died or ended by an error" in result.logs["ps-0"]) == bool(code)


CHIEFLESS = """
import sys
from keras_psplus.cluster.config import read_task_config
if read_task_config().task_type == "ps":
    from keras_psplus.cli.main import main
    sys.exit(main(["serve", "--startup_timeout=1"]))
import time; time.sleep(60)
"""


def test_chief_that_never_comes_is_an_error():
    result = run_in_processes(
        CHIEFLESS, workers=0, chief=True, ps=1, timeout=60, expect_failure=True, failure_grace=0.1
    )
    assert result.exit_codes["ps-0"] == 1
    assert "chief-0 did not come to 127.0.0.1" in result.logs["ps-0"]


def test_mistakes_are_told_before_the_server_starts():
    serve = pytest.importorskip("keras_psplus.cluster.serving.serve")
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        config = TaskConfig({"chief": ("127.0.0.1:1",), "ps": (taken,)}, "ps", 0)
        with pytest.raises(serve.ClusterStartupError, match="uses the port"):
            serve.serve(config)
    with pytest.raises(serve.ClusterConfigError, match="worker-0 cannot serve"):
        serve.serve(TaskConfig({"worker": ("127.0.0.1:1",)}, "worker", 0))
