"""A task that serves: it waits for its chief, and knows whether that has ended well."""

import socket
import types

import pytest

from keras_psplus.cluster import serving
from keras_psplus.cluster.config import ClusterConfigError, ClusterStartupError, TaskConfig
from keras_psplus.cluster.serving import ShutdownListener
from keras_psplus.errors import ChiefLostError
from tests.cluster.simulated import Clock
from tests.support.jobs import run_in_processes

SERVER = TaskConfig({"chief": ("127.0.0.1:1",), "ps": ("127.0.0.1:2",)}, "ps", 0)


class Chief:
    """A chief that is there from some seconds to others, instead of `handshake`."""

    def __init__(self, monkeypatch, *spans):
        self.clock, self.listener = Clock(serving, monkeypatch=monkeypatch), ShutdownListener()
        self._spans = [(self.clock.now + begin, self.clock.now + end) for begin, end in spans]
        monkeypatch.setattr(serving, "handshake", self)
        monkeypatch.setattr(serving, "wait_for_close", self._wait_for_close)
        signals = types.SimpleNamespace(SIGNAL=types.SimpleNamespace(watch=lambda: None))
        monkeypatch.setattr(serving, "signals", signals)

    def listens(self, address, seconds=None):
        return any(begin <= self.clock.now < end for begin, end in self._spans)

    tensorflow_responds = listens

    def _wait_for_close(self, address):
        now = self.clock.now
        self.clock.sleep(next(end for begin, end in self._spans if begin <= now < end) - now)

    def says(self, word, seconds):
        self.clock.after(seconds, lambda: self.listener.receive(word))

    def outlived(self):
        """Seconds until the server ends, and its lines."""
        began, lines, heard = self.clock.now, [], self.listener
        serving.outlive(
            SERVER,
            lambda: heard.has_chief_started,
            lambda: heard.is_chief_lost,
            lambda: heard.has_chief_left,
            startup_timeout=60,
            chief_gone=5,
            log=lines.append,
        )
        return self.clock.now - began, lines


def test_a_chief_that_never_comes_is_an_error(monkeypatch):
    chief = Chief(monkeypatch)
    with pytest.raises(ClusterStartupError, match="chief-0 did not come to 127.0.0.1:1 within 60"):
        chief.outlived()
    assert 1060 <= chief.clock.now < 1062


# TensorFlow's own says nothing. One that is away for less than `chief_gone` has not ended; one that
# has taken leave is not waited for.
@pytest.mark.parametrize(("words", "gone"), [((), 5), (("hello", "shutdown"), 0)])
def test_a_server_ends_after_its_chief(monkeypatch, words, gone):
    chief = Chief(monkeypatch, (10, 30), (33, 50))
    for word, seconds in zip(words, (10, 49)):
        chief.says(word, seconds)
    seconds, lines = chief.outlived()
    assert 50 + gone <= seconds <= 52 + gone and lines == ["chief-0 has ended, ps-0 ends"]


def test_a_chief_that_greets_before_its_server_is_there_and_dies(monkeypatch):
    chief = Chief(monkeypatch, (12, 30))
    chief.says("hello", 10)
    with pytest.raises(ChiefLostError, match="has died or ended by an error.* ps-0 ends with it"):
        chief.outlived()
    assert 1035 <= chief.clock.now <= 1037


def test_a_process_beside_the_cluster_waits_for_the_end_of_its_chief(monkeypatch):
    chief = Chief(monkeypatch, (10, 50))
    serving.wait_for_end_of_chief(SERVER)
    assert 1055 <= chief.clock.now <= 1057


def test_mistakes_are_told_before_the_server_starts():
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        config = TaskConfig({"chief": ("127.0.0.1:1",), "ps": (taken,)}, "ps", 0)
        with pytest.raises(ClusterStartupError, match="uses the port"):
            serving.serve(config)
    with pytest.raises(ClusterConfigError, match="worker-0 cannot serve"):
        serving.serve(TaskConfig({"worker": ("127.0.0.1:1",)}, "worker", 0))


JOB = """
import sys
from keras_psplus.cluster.config import read_task_config
from keras_psplus.cluster.preflight import wait_for_cluster
config = read_task_config()
if config.task_type == "chief":
    import tensorflow as tf
    from keras_psplus.cluster.serving import ShutdownNotifier
    wait_for_cluster(config, ("ps",), timeout=60)
    cluster = {job: list(tasks) for job, tasks in config.cluster.items()}
    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec(cluster), job_name="chief", protocol="grpc"
    )
    ShutdownNotifier({"ps-0": config.cluster["ps"][0]})
    raise ValueError("the script's own")
else:
    from keras_psplus.cli.main import main
    sys.exit(main(["serve", "--chief_gone=1.5", "--startup_timeout=60"]))
"""


@pytest.mark.processes
def test_a_server_knows_that_its_chief_has_ended_by_an_error():
    result = run_in_processes(
        JOB, workers=0, chief=True, ps=1, expect_failure=True, failure_grace=60
    )
    assert result.exit_codes["ps-0"] == 1
    assert "ps-0 serves on 127.0.0.1" in result.logs["ps-0"]
    assert "has died or ended by an error" in result.logs["ps-0"]
