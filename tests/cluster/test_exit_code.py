"""With what exit code a process is about to end."""

import sys

import pytest

from keras_psplus.cluster.process import signals


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    monkeypatch.setattr(signals.EXITS, "is_watching", False)
    monkeypatch.setattr(signals.EXITS, "codes", [])
    monkeypatch.delattr(sys, "last_value", raising=False)
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
