"""A task that serves: it waits for its chief, and knows whether that has ended well."""

import math
import socket
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_psplus.cluster import serving
from keras_psplus.cluster.config import ClusterConfigError, ClusterStartupError, TaskConfig
from keras_psplus.cluster.serving import ShutdownListener
from keras_psplus.errors import ChiefLostError
from tests.support.clock import Clock, few
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
        """Lines of the server until it ends."""
        lines, heard = [], self.listener
        serving.outlive(
            SERVER,
            lambda: heard.has_chief_started,
            lambda: heard.is_chief_lost,
            lambda: heard.has_chief_left,
            startup_timeout=STARTUP,
            chief_gone=GONE,
            log=lines.append,
        )
        return lines


GONE, STARTUP, POLLS = 5, 60, 2


def expected(spans, words):
    """End of a server, and the seconds until then.

    Args:
        spans: Seconds from which to which its chief can be reached.
        words: Dict from what the chief says to when.
    """
    hello, shutdown = (words.get(word, math.inf) for word in ("hello", "shutdown"))
    come = min([*(begin for begin, _ in spans), hello, shutdown])
    if come > STARTUP:
        return "never came", STARTUP
    end = come
    for begin, until in spans:
        if begin - end > GONE or (shutdown < end):
            break
        end = until
    # One that has taken leave is not waited for.
    end += 0 if shutdown < end else GONE
    return "lost" if hello < end < shutdown else "ended", end


SECONDS = st.sampled_from([0, 1, 3, 8, 40, 90])
SPANS = st.lists(st.tuples(SECONDS, st.sampled_from([3, 9, 50])), max_size=3)


# TensorFlow's own chief says nothing.
@few
@given(SPANS, st.none() | SECONDS, st.none() | st.integers(0, 2))
def test_a_server_ends_once_its_chief_has_and_not_before(spans, hello, left_in):
    moment, there, words = 0, [], {}
    for away, long in spans:
        away = max(away, len(there[:1]))  # Nobody comes the moment that another one ends.
        there.append((moment + away, moment + away + long))
        moment += away + long
    if hello is not None:
        words["hello"] = hello
        if left_in is not None and left_in < len(there):
            words["shutdown"] = max(hello, there[left_in][1]) - 0.75
    with pytest.MonkeyPatch.context() as monkeypatch:
        chief, lines = Chief(monkeypatch, *there), []
        for word, seconds in words.items():
            chief.says(word, seconds)
        began, how = chief.clock.now, "ended"
        try:
            lines = chief.outlived()
        except ClusterStartupError as error:
            assert f"{error}".startswith("chief-0 did not come to 127.0.0.1:1 within 60 s")
            how = "never came"
        except ChiefLostError as error:
            assert "has died or ended by an error" in f"{error}"
            assert "ps-0 ends with it" in f"{error}"
            how = "lost"
        seconds = chief.clock.now - began
    assert lines == (["chief-0 has ended, ps-0 ends"] if how == "ended" else [])
    wanted, end = expected(there, words)
    assert end <= seconds <= end + POLLS
    # A word that is said just as it ends may still be heard.
    assert how == wanted or any(end <= moment <= seconds for moment in words.values())


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
