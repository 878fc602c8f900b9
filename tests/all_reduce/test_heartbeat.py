"""After how long without an answer a worker counts as dead."""

import contextlib
import socket
import time
import types

import pytest
import tensorflow as tf

from keras_psplus.all_reduce import liveness
from keras_psplus.all_reduce.liveness import HeartbeatWatch, Silence
from keras_psplus.cluster import preflight
from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.handshake import ANSWERS, GONE, SILENT, is_silent, places_of
from keras_psplus.core.jobs import failure
from tests.support.tables import for_each


def dead_after(stop, phase, timeout=20.0, answer=1.0, pause=0.25):
    """Seconds after its stop at which one that stops for a while counts as dead, or None."""
    silence, now = Silence(timeout, answer), phase
    while now < stop + 2 * timeout:
        asked = now
        is_so = 0 <= asked < stop - answer
        now += answer if is_so else 0.001
        if silence.note(["worker-1"] if is_so else [], asked, now):
            return now
        now += pause
    return None


@for_each("phase", [-5 - 0.05 * i for i in range(30)])
def test_the_figure_is_true_to_within_two_seconds(phase):
    assert dead_after(18, phase) is None
    assert 18 <= dead_after(22.5, phase) <= 22
    assert 18 <= dead_after(1000, phase) <= 22


def test_who_answers_once_is_alive():
    silence = Silence(20, 1)
    for now in range(18):
        assert not silence.note(["a", "b"], now, now + 1)
    assert not silence.note(["b"], 18, 19)
    assert list(silence.note(["a", "b"], 19, 20)) == ["b"]


def test_the_time_of_an_own_stop_does_not_count():
    silence = Silence(20, 1)
    assert not silence.note(["a"], 0, 1)
    assert not silence.note(["a"], 1.25, 30)
    assert not silence.note(["a"], 31, 32)
    assert silence.note(["a"], 32, 34) == {}


@contextlib.contextmanager
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server, f"127.0.0.1:{server.getsockname()[1]}"


def test_who_accepts_and_says_nothing_is_silent_and_who_is_gone_is_not():
    with listening() as (server, address):
        assert is_silent(places_of(address), 0.2)
        server.accept()[0].close()
        with socket.create_connection(server.getsockname()):
            pass
    assert not is_silent(places_of(address), 5)
    assert not is_silent(places_of("no-such-host.invalid:1"), 5)
    assert not is_silent(places_of(f"{'x' * 70}:1"), 5)


TASK = TaskConfig({"worker": ("127.0.0.1:1", "127.0.0.1:2")}, "worker", 0)


class Steps:
    """Steps that go on for some seconds."""

    def __init__(self, seconds):
        self._end = time.monotonic() + seconds

    @property
    def entered(self):
        return min(time.monotonic(), self._end)


def test_a_silent_worker_is_named_in_the_error_of_collectives(monkeypatch):
    calls = []
    runtime = types.SimpleNamespace(abort_collective_ops=lambda *args: calls.append(args))
    monkeypatch.setattr(liveness.context, "context", lambda: runtime)
    with listening() as (_, address):
        # Nobody is where the first one was: that it has ended is for TensorFlow to say.
        task = TaskConfig({"worker": ("127.0.0.1:1", "127.0.0.1:2", address)}, "worker", 1)
        watch = HeartbeatWatch(task, 0.8)
        watch.start(Steps(0))
        end = time.monotonic() + 20
        while not calls and time.monotonic() < end:
            time.sleep(0.05)
    assert watch.lost == ("worker-2",)
    ((code, message),) = calls
    assert code == tf.errors.UNAVAILABLE
    monkeypatch.setattr(failure, "_failed_at", None)
    with pytest.raises(failure.PeerLostError) as lost, failure.translate_errors(task):
        raise tf.errors.UnavailableError(None, None, f"aborted by: {message}\nAnd more")
    assert str(lost.value).startswith(f"worker-2 ({address}) stopped answering, and worker-1 ")
    assert "Received: no answer for 1 s, with heartbeat_timeout=0.8" in str(lost.value)


def test_in_a_large_cluster_neighbours_are_asked_and_the_others_are_told(monkeypatch):
    monkeypatch.setattr(preflight, "EVERYBODY", 4)
    monkeypatch.setattr(failure, "_reported_at", None)
    aborted, told = [], []
    runtime = types.SimpleNamespace(
        abort_collective_ops=lambda *args: aborted.append(args),
        report_error_to_cluster=lambda code, message: told.append(message),
    )
    monkeypatch.setattr(liveness.context, "context", lambda: runtime)
    with listening() as (_, dead):
        addresses = [f"127.0.0.1:{port}" for port in range(1, 9)]
        addresses[2] = dead
        watches = {
            i: HeartbeatWatch(TaskConfig({"worker": tuple(addresses)}, "worker", i), 0.8)
            for i in (1, 7)
        }
        # At distances of 1, 2 and 4, and the one before.
        assert [*watches[1]._addresses] == [f"worker-{i}" for i in (0, 2, 3, 5)]
        assert [*watches[7]._addresses] == [f"worker-{i}" for i in (0, 1, 3, 6)]
        watches[1].start(Steps(0))
        end = time.monotonic() + 20
        while not told and time.monotonic() < end:
            time.sleep(0.05)
    assert watches[1].lost == ("worker-2",)
    assert told == [message for _, message in aborted]
    # As it reaches one that has not asked.
    monkeypatch.setattr(failure, "_failed_at", None)
    with pytest.raises(failure.PeerLostError, match=r"^worker-2 \(\S+\) stopped answering"):
        with failure.translate_errors(TASK):
            raise tf.errors.InvalidArgumentError(None, None, told[0])


def test_nobody_is_asked_while_steps_go_on(monkeypatch):
    asked = []
    runtime = types.SimpleNamespace(abort_collective_ops=lambda *args: None)
    monkeypatch.setattr(liveness.context, "context", lambda: runtime)
    watch = HeartbeatWatch(TASK, 0.4)
    watch._asks = lambda *_: asked.append(time.monotonic()) or True
    steps = Steps(0.5)
    watch.start(steps)
    end = time.monotonic() + 20
    while not watch.lost and time.monotonic() < end:
        time.sleep(0.05)
    assert watch.lost and min(asked) >= steps.entered


def test_what_does_not_answer_just_now_is_waited_for(monkeypatch):
    task = TaskConfig({"worker": ("a:1", "a:2", "a:3")}, "worker", 0)
    states = [("worker-1", "a:2", SILENT), ("worker-2", "a:3", ANSWERS)]
    monkeypatch.setattr(failure, "_states", lambda task: states)
    monkeypatch.setattr(failure, "_failed_at", None)
    error = TimeoutError("no answer")
    failure.raise_if_peer_gone(task, error, ())
    with pytest.raises(failure.PeerLostError, match=r"^worker-1 \(a:2\) stopped"):
        failure.raise_if_peer_gone(task, error, ("worker-1",))
    states[1] = ("worker-2", "a:3", GONE)
    with pytest.raises(failure.PeerLostError, match=r"^worker-2 \(a:3\) stopped"):
        failure.raise_if_peer_gone(task, error, ())
