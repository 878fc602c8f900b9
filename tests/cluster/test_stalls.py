"""When a wait is logged, and when it is not."""

import logging

import pytest

from keras_psplus.cluster.monitor import stalls
from keras_psplus.cluster.monitor.stalls import Inspector, PendingWait, WarningSchedule
from keras_psplus.log import logger
from tests.support.tables import for_each


@pytest.fixture
def lines():
    """What the library logs."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.fixture
def inspect():
    """An inspector without its thread: the function of waits and a time makes it look."""
    inspector = Inspector(None, None)
    inspector._limit = 60

    def look_at(waits, now):
        inspector._look = lambda: dict(waits)
        inspector._inspect(now)

    return look_at


def test_a_wait_is_logged_at_each_doubling_and_when_it_is_over(inspect, lines):
    wait = PendingWait("worker-0 at training step 7", lambda: "a collective; not arrived: worker-1")
    for now in range(0, 500, 5):
        inspect({7: wait}, now)
    inspect({}, 500)
    line = "worker-0 at training step 7 has waited {} s for a collective; not arrived: worker-1"
    assert lines == [
        *[line.format(seconds) for seconds in (60, 120, 240, 480)],
        "worker-0 at training step 7 goes on after 500 s",
    ]


def test_steps_that_go_on_are_not_logged(inspect, lines):
    for now in range(0, 500, 5):
        inspect({now: PendingWait("step", lambda: pytest.fail("nobody has to be asked"))}, now)
    assert lines == []


def test_what_came_while_others_were_asked_is_not_logged(inspect, lines):
    waits = {}
    waits[1] = PendingWait("step", lambda: waits.clear() or "nothing", since=0)
    inspect(waits, 61)
    inspect(waits, 62)
    assert lines == []


def test_none_is_never(lines):
    assert not WarningSchedule(None).is_due(1e9)


@for_each("value", [0, -1, "60", True, float("nan")])
def test_a_wrong_limit_is_refused(value):
    with pytest.raises(ValueError, match="`stall_warning` must be .* Received: stall_warning="):
        stalls.check_stall_warning(value)
