"""With what exit code a process is about to end."""

import sys

import pytest

from keras_psplus.cluster.process import exit_code


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    monkeypatch.setattr(exit_code.EXITS, "is_watching", False)
    monkeypatch.setattr(exit_code.EXITS, "codes", [])
    monkeypatch.delattr(sys, "last_value", raising=False)
    exit_code.watch()
    exit_code.watch()


@pytest.mark.parametrize(
    "status, is_bad", [((), False), ((0,), False), ((3,), True), (("no",), True)]
)
def test_what_a_script_leaves_with_is_known(status, is_bad):
    assert not exit_code.is_bad()
    with pytest.raises(SystemExit) as raised:
        sys.exit(*status)
    assert raised.value.code == (status[0] if status else None)
    assert exit_code.is_bad() is is_bad
    assert exit_code.last() == (status[0] if status else None)


def test_the_last_one_counts(monkeypatch):
    for status in (2, 0):
        with pytest.raises(SystemExit):
            sys.exit(status)
    assert not exit_code.is_bad()
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    assert exit_code.is_bad()
