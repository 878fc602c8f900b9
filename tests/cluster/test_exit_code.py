"""With what exit code a process is about to end, and who hears of its error."""

import sys

import pytest

from keras_psplus import activation
from keras_psplus.cluster.process import signals
from keras_psplus.engine import Call


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    monkeypatch.setattr(signals.EXITS, "is_watching", False)
    monkeypatch.setattr(signals.EXITS, "codes", [])
    monkeypatch.delattr(sys, "last_value", raising=False)
    activation.activate()  # as a strategy does, whose hooks hear of it
    signals.watch()
    signals.watch()


@pytest.mark.parametrize(
    "status, is_bad", [((), False), ((0,), False), ((3,), True), (("no",), True)]
)
def test_what_a_script_leaves_with_is_known(status, is_bad):
    assert not signals.is_bad()
    with pytest.raises(SystemExit) as raised:
        sys.exit(*status)
    assert raised.value.code == (status[0] if status else None)
    assert signals.is_bad() is is_bad
    assert signals.last() == (status[0] if status else None)


def test_the_last_one_counts(monkeypatch):
    for status in (2, 0):
        with pytest.raises(SystemExit):
            sys.exit(status)
    assert not signals.is_bad()
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    assert signals.is_bad()


def test_an_error_is_reported_before_it_is_shown_and_waited_for_afterwards(monkeypatch):
    order, error = [], KeyError("x")

    def report(kind, found):
        assert (kind, found) == (KeyError, error)
        order.append("reported")
        return lambda: order.append("waited")

    monkeypatch.setattr(signals.UNCAUGHT, "reporters", [report, lambda *_: None])
    signals.UNCAUGHT.show(Call(lambda *_: order.append("shown"), KeyError, (error, None)))
    assert order == ["reported", "shown", "waited"]
