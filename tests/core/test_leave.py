"""The first worker's stay for the others, when its script has ended."""

import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.handshake import ANSWERS, GONE
from keras_psplus.core.jobs import leave
from tests.support.clock import Clock, few

MOMENTS = st.sampled_from([0.0, 2.0, 9.0, 14.0, 29.0, 40.0, math.inf])


class World(Clock):
    """Workers that say that they leave, end, or are found silent, each at a moment."""

    def __init__(self, monkeypatch, left, gone, silent):
        super().__init__(leave, monkeypatch=monkeypatch)
        self.now, self._left, self._gone, self._silent = 0.0, left, gone, silent
        monkeypatch.setattr(leave, "places_of", lambda address: int(address[-1]) - 2)
        monkeypatch.setattr(leave, "state_of", self._state_of)
        monkeypatch.setattr(leave, "has_left", self._has_left)

    def silent(self):
        return [f"worker-{i + 1}" for i, moment in enumerate(self._silent) if moment <= self.now]

    def _has_left(self, name, seconds):
        moment = self._left[int(name[-1]) - 1]
        self.reach(min(moment, self.now + seconds))
        return moment <= self.now

    def _state_of(self, worker, seconds):
        return GONE if self._gone[worker] <= self.now else ANSWERS


@few
@given(st.lists(st.tuples(MOMENTS, MOMENTS, MOMENTS), min_size=1, max_size=4))
def test_it_stays_until_all_have_left_and_ended_and_not_for_ever(others):
    left, gone, silent = zip(*others)
    cluster = {"worker": tuple(f"h:{i + 1}" for i in range(1 + len(others)))}
    has_ended = threading.Event()
    has_ended.set()
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = World(monkeypatch, left, gone, silent)
        leave._run(TaskConfig(cluster, "worker", 0), world.silent, has_ended)
    all_left = min(leave._STAY_SECONDS, max(min(moments) for moments in others))
    # One is asked after the other, for a second each.
    polls = len(others) + 0.5
    end = min(leave._STAY_SECONDS, all_left + leave._END_SECONDS)
    assert all_left <= world.now <= end + polls
    assert min(max(gone), end) <= world.now <= max(all_left, *gone) + polls
