"""Seconds of a worker's steps, on a clock that stands still between them."""

import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.all_reduce import liveness
from keras_psplus.all_reduce.liveness import ARRIVED, DONE, StepClock
from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.monitor.progress import Progress

TASK = TaskConfig({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "worker", 0)


class Steps:
    """Takes steps of a second for data and two for the rest."""

    def __init__(self, monkeypatch):
        self.now, self.met = 1000.0, 0.0
        monkeypatch.setattr(time, "time", lambda: self.now)
        monkeypatch.setattr(tf, "timestamp", lambda: tf.constant(self.now, tf.float64))
        monkeypatch.setattr(liveness, "_ORIGIN", 0.0)
        self.clock, self.progress = StepClock(), Progress()
        self.clock.start(TASK, self.progress, lambda: self.met)

    def take(self, steps=1, fails=False, traces=False):
        with self.progress.timing(steps):
            if traces:
                with self.clock.tracing():
                    pass
            for _ in range(steps):
                self.now += 1
                self.clock.mark(ARRIVED, [])
                if fails:
                    raise ArithmeticError
                self.now += 1.5
                self.met += 0.5
                self.clock.mark(DONE, [])
            self.now += 0.5

    def times(self):
        (times,) = self.progress.times().values()
        return times


@pytest.fixture
def steps(monkeypatch):
    return Steps(monkeypatch)


def check(times, data, seconds, host=0.0, meets=None):
    found = times.data, times.seconds, times.host
    np.testing.assert_allclose(found, (data, seconds, host), atol=1e-6)
    if meets is not None:
        np.testing.assert_allclose(times.meets, meets, atol=1e-6)


def test_the_parts_of_steps(steps):
    assert steps.progress.times() == {}
    for _ in range(4):
        steps.take()
        steps.now += 0.25
    check(steps.times(), data=4, seconds=12, host=0.75, meets=2)
    # Between two epochs is validation.
    steps.now += 100
    steps.progress.begin_epoch()
    steps.take()
    check(steps.times(), data=5, seconds=15, host=0.75)


def test_a_traced_step_is_left_out(steps):
    steps.take(traces=True)
    steps.take()
    check(steps.times(), data=1, seconds=3, meets=0.5)
    assert steps.times().steps == 1


def test_a_failed_step_and_the_end_of_data_change_nothing(steps):
    steps.take()
    check(steps.times(), data=1, seconds=3)
    with pytest.raises(ArithmeticError):
        steps.take(fails=True)
    with pytest.raises(StopIteration), steps.progress.timing(1):
        raise StopIteration
    check(steps.times(), data=1, seconds=3)
    steps.progress.begin_epoch()
    steps.take()
    check(steps.times(), data=2, seconds=6)


def test_steps_that_nobody_calls_through_keras(steps):
    steps.take()
    steps.clock.mark(ARRIVED, [])
    check(steps.times(), data=1, seconds=3)


def test_several_steps_in_a_call_after_single_ones(steps):
    steps.take()
    steps.now += 0.25
    # The end of the call, after the last step, is nobody's wait for data but the call's.
    steps.take(steps=4)
    times = steps.times()
    assert times.steps == 5
    check(times, data=1 + 4 * 1 + 0.5, seconds=3 + 4 * 2.5 + 0.5, host=0.25)
    steps.take()
    check(steps.times(), data=6.5, seconds=16.5, host=0.25)


def test_another_thread_asks_during_a_step(steps):
    steps.take()
    found = []
    with steps.progress.timing(1):
        steps.now += 1
        steps.clock.mark(ARRIVED, [])
        asks = threading.Thread(target=lambda: found.append(steps.times()))
        asks.start()
        asks.join()
        steps.clock.mark(DONE, [])
    check(found[0], data=1, seconds=3)
    check(steps.times(), data=2, seconds=4)
