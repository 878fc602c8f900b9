"""After how long without an answer a worker counts as dead."""

import contextlib
import socket
import time
import types

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from keras_psplus.all_reduce import liveness
from keras_psplus.all_reduce.liveness import HeartbeatWatch
from keras_psplus.cluster import handshake, preflight
from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.handshake import ANSWERS, GONE, is_silent, places_of
from keras_psplus.core.jobs import failure
from tests.support import jobs
from tests.support.clock import Clock, few

TASK = TaskConfig({"worker": ("h:1", "h:2", "h:3")}, "worker", 0)
TIMEOUT, ANSWER = 20.0, 1.0
# A question every 1.25 s, and an own stop of three seconds.
SLACK = 6.0
HORIZON = 150.0


class Over(Exception):
    """End of what is looked at."""


class World(Clock):
    """Others, own steps, and times in which this process is stopped, each as pairs of moments.

    Silences are further apart than a short stop of its own, in which it does not ask.

    It stands for `time`, for a pool of threads, and for `Progress`.
    """

    def __init__(self, monkeypatch, silent, steps=(), stops=()):
        super().__init__(liveness, monkeypatch=monkeypatch)
        self.now, self.silent, self._steps, self._stops = 0.0, silent, steps, list(stops)
        futures = types.SimpleNamespace(ThreadPoolExecutor=lambda count: self)
        pool = types.SimpleNamespace(futures=futures)
        monkeypatch.setattr(liveness, "concurrent", pool)
        monkeypatch.setattr(liveness, "places_of", lambda address: address)

    def reach(self, moment):
        for stop in [stop for stop in self._stops if stop[0] <= moment]:
            self._stops.remove(stop)
            moment = max(moment, stop[1])
        super().reach(moment)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def map(self, asks, addresses, limits):
        answers = [asks(address, limit) for address, limit in zip(addresses, limits)]
        self.sleep(max(limits) if any(answers) else 0.001)
        return answers

    def is_silent(self, address, limit):
        # A question from just before the end of a stop is answered late.
        return any(begin <= self.now < end - limit for begin, end in self.silent.get(address, ()))

    @property
    def entered(self):
        if self.now > HORIZON:
            raise Over
        return sum(max(0.0, min(self.now, end) - begin) for begin, end in self._steps)

    def watch(self, task, timeout=TIMEOUT):
        """A watch that has ended, at the moment `now`."""
        watch = HeartbeatWatch(task, timeout)
        watch._asks = self.is_silent
        with contextlib.suppress(Over):
            watch._run(self)
        return watch


def without(pairs, others):
    """Times without others, as pairs."""
    for begin, end in others:
        parts = [part for a, b in pairs for part in ((a, min(b, begin)), (max(a, end), b))]
        pairs = [(a, b) for a, b in parts if a < b]
    return pairs


@st.composite
def times(draw, lengths, most=2):
    now, pairs = 0.0, []
    for _ in range(draw(st.integers(0, most))):
        begin = now + draw(st.integers(24, 120)) / 4
        now = begin + draw(st.sampled_from(lengths))
        pairs.append((begin, now))
    return pairs


SILENT = times([3.0, 18.0, 19.0, 27.0, 90.0], most=4)


@few
@given(SILENT, SILENT, times([2.0, 15.0], most=4), times([3.0, 30.0]))
def test_who_is_silent_for_the_timeout_is_lost_and_nobody_else(first, second, steps, stops):
    silent = {"h:2": first, "h:3": second}
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = World(monkeypatch, silent, steps, stops)
        monkeypatch.setattr(HeartbeatWatch, "_end", lambda *_: None)
        lost, ended = world.watch(TASK).lost, world.now
    # Neither what goes by in steps counts, in which nobody is asked, nor in a long stop of its own.
    for name, address in (("worker-1", "h:2"), ("worker-2", "h:3")):
        counted = without(silent[address], [*steps, *(s for s in stops if s[1] - s[0] > 3)])
        assert name not in lost or any(
            begin + TIMEOUT - ANSWER <= ended <= end + SLACK for begin, end in counted
        )
        for begin, end in counted:
            assert end - begin < TIMEOUT + SLACK or ended <= begin + TIMEOUT + SLACK


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


def test_a_silent_worker_is_named_in_the_error_of_collectives(monkeypatch):
    calls = []
    runtime = types.SimpleNamespace(abort_collective_ops=lambda *args: calls.append(args))
    monkeypatch.setattr(liveness.context, "context", lambda: runtime)
    with listening() as (_, address):
        # Nobody is where the first one was: that it has ended is for TensorFlow to say.
        task = TaskConfig({"worker": ("127.0.0.1:1", "127.0.0.1:2", address)}, "worker", 1)
        watch = HeartbeatWatch(task, 0.8)
        watch.start(types.SimpleNamespace(entered=0))
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
    addresses = tuple(f"h:{port}" for port in range(1, 9))
    # At distances of 1, 2 and 4, and the one before.
    for i, others in ((1, (0, 2, 3, 5)), (7, (0, 1, 3, 6))):
        watch = HeartbeatWatch(TaskConfig({"worker": addresses}, "worker", i), TIMEOUT)
        assert [*watch._addresses] == [f"worker-{other}" for other in others]
    world = World(monkeypatch, {"h:3": [(0, HORIZON)]})
    watch = world.watch(TaskConfig({"worker": addresses}, "worker", 1))
    jobs.wait_for(lambda: told, 20)
    assert watch.lost == ("worker-2",)
    assert told == [message for _, message in aborted]
    # As it reaches one that has not asked.
    monkeypatch.setattr(failure, "_failed_at", None)
    with pytest.raises(failure.PeerLostError, match=r"^worker-2 \(\S+\) stopped answering"):
        with failure.translate_errors(TASK):
            raise tf.errors.InvalidArgumentError(None, None, told[0])


def test_what_does_not_answer_just_now_is_waited_for(monkeypatch):
    task = TaskConfig({"worker": ("a:1", "a:2", "a:3")}, "worker", 0)
    states = [("worker-1", "a:2", handshake.SILENT), ("worker-2", "a:3", ANSWERS)]
    monkeypatch.setattr(failure, "_states", lambda task: states)
    monkeypatch.setattr(failure, "_failed_at", None)
    error = TimeoutError("no answer")
    failure.raise_if_peer_gone(task, error, ())
    with pytest.raises(failure.PeerLostError, match=r"^worker-1 \(a:2\) stopped"):
        failure.raise_if_peer_gone(task, error, ("worker-1",))
    states[1] = ("worker-2", "a:3", GONE)
    with pytest.raises(failure.PeerLostError, match=r"^worker-2 \(a:3\) stopped"):
        failure.raise_if_peer_gone(task, error, ())
