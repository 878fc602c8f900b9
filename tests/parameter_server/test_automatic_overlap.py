"""`overlap_steps="auto"`: what the first steps show decides, and is said."""

import types

import pytest

from keras_psplus.parameter_server.context import OverlapChoice
from tests.support.tables import for_each

WORKERS = 2


class Totals:
    """Totals of steps in which each worker sends some bytes and waits for some seconds."""

    def __init__(self):
        self.seconds, self.bytes = 0.0, 0

    def traffic(self):
        return [types.SimpleNamespace(wire_bytes=self.bytes)]


def take(choice, totals, steps, seconds, waiting, sent):
    for _ in range(steps):
        totals.seconds += WORKERS * waiting
        totals.bytes += WORKERS * sent
        choice.note(seconds)


def choose(without, overlapping, waiting, sent):
    """The choice, and whether steps overlapped for a while."""
    totals = Totals()
    choice = OverlapChoice(None, WORKERS, totals)
    take(choice, totals, 2, 20.0, 20.0, sent)  # these trace
    take(choice, totals, 6, without, waiting, sent)
    is_tried = choice.is_on
    take(choice, totals, 3, 20.0, 20.0, sent)
    take(choice, totals, 6, overlapping, waiting, sent)
    return choice.is_on, is_tried


@pytest.mark.parametrize(
    "without, overlapping, waiting, sent, expected",
    [
        (0.34, 0.25, 0.31, 20 << 20, (True, True)),
        # Waiting is of the processors: it is slower.
        (0.08, 0.11, 0.06, 20 << 20, (False, True)),
        (0.34, 0.33, 0.31, 20 << 20, (False, True)),
        # Nothing to gain.
        (0.34, 0.10, 0.05, 20 << 20, (False, False)),
        (0.02, 0.01, 0.015, 100_000, (False, False)),
    ],
)
def test_the_faster_way_stays(without, overlapping, waiting, sent, expected, caplog):
    assert choose(without, overlapping, waiting, sent) == expected
    said = "steps overlap: they take" if expected[0] else "steps do not overlap: "
    assert said in caplog.text and caplog.text.count('overlap_steps="auto"') == 1


def test_steps_that_take_longer_are_measured_again(caplog):
    totals = Totals()
    choice = OverlapChoice(None, WORKERS, totals)
    take(choice, totals, 8, 0.08, 0.01, 20 << 20)
    take(choice, totals, 60, 0.07, 0.01, 20 << 20)
    assert not choice.is_on and caplog.text.count("do not overlap") == 1
    # Its link has become slow.
    take(choice, totals, 6 + 8, 0.34, 0.31, 20 << 20)
    assert choice.is_on and "no longer 80: whether they overlap is measured again" in caplog.text
    take(choice, totals, 9 + 6, 0.26, 0.2, 20 << 20)
    assert choice.is_on
    # Slower still: the same again, after which it is measured more seldom.
    take(choice, totals, 6 + 8, 3.4, 3.1, 20 << 20)
    take(choice, totals, 9, 2.6, 2.0, 20 << 20)
    assert choice.is_on and caplog.text.count("measured again") == 2
    take(choice, totals, 11, 0.08, 0.01, 20 << 20)
    assert caplog.text.count("measured again") == 2
    take(choice, totals, 1 + 8, 0.08, 0.01, 20 << 20)
    assert not choice.is_on and caplog.text.count("measured again") == 3


def test_steps_without_a_worker_decide_nothing(caplog):
    totals = Totals()
    choice = OverlapChoice(None, WORKERS, totals)
    take(choice, totals, 8, 0.34, 0.31, 20 << 20)
    # They do not overlap, although it is being tried.
    take(choice, totals, 20, None, 0.6, 20 << 20)
    take(choice, totals, 3 + 6, 0.25, 0.2, 20 << 20)
    assert choice.is_on and caplog.text.count('overlap_steps="auto"') == 1
    take(choice, totals, 5, 0.25, 0.2, 20 << 20)
    take(choice, totals, 20, None, 0.6, 20 << 20)
    take(choice, totals, 5, 0.7, 0.6, 20 << 20)
    assert choice.is_on and "measured again" not in caplog.text


@for_each("argument", [True, False])
def test_what_the_script_says_stays(argument):
    choice, totals = OverlapChoice(argument, WORKERS, None), Totals()
    take(choice, totals, 40, 0.3, 0.3, 1 << 30)
    assert choice.is_on is argument
