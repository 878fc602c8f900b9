"""Where a job's wall time went, over its starts."""

import time

import pytest

from keras_psplus.cluster.monitor import goodput
from keras_psplus.cluster.monitor.goodput import Account, Goodput, TimeSheet


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])

    def pass_by(seconds):
        now[0] += seconds

    return pass_by


def test_a_start_that_repeats_steps(tmp_path, clock):
    path = tmp_path / "worker-0.account"
    assert goodput.read(path) is None
    first = TimeSheet(path)
    first.begin_epoch(1, 0)
    clock(5)
    first.end_batches(1, 1)  # traced
    clock(2)
    with first.spending(goodput.SAVES):
        clock(1)
    clock(2)
    first.end_batches(3, 2)
    account = goodput.read(path)
    assert (account.place, account.repeated_steps) == ((1, 0, 3), 0)
    assert account.seconds == {
        "training": 4.0,
        "tracing": 5.0,
        "repeated": 0.0,
        "saves": 1.0,
        "evaluation": 0.0,
    }
    # It is killed; the next one goes on after the first batch.
    clock(10)
    second = TimeSheet(path)
    second.begin_epoch(1, 0)
    clock(3)
    second.end_batches(2, 1)
    clock(2)
    assert goodput.read(path).place == (1, 0, 3)
    second.end_batches(3, 1)
    clock(2)
    second.end_batches(4, 1)
    second.pause()
    with second.spending(goodput.EVALUATION):
        clock(1)
    again = goodput.read(path)
    assert (again.place, again.repeated_steps) == ((1, 0, 4), 2)
    assert again.seconds["repeated"] == again.seconds["training"] == 2
    assert again.seconds["tracing"] == 3 and again.seconds["evaluation"] == 1

    whole = Goodput(990.0)
    whole.add(account, 1010.0)
    whole.add(again, 1030.0)
    summary = whole.summary(1030.0)
    assert (summary["start_s"], summary["restart_s"]) == (10, 13)
    assert summary["training_s"] == 6 and summary["goodput"] == round(6 / 40, 4)
    assert (summary["repeated_s"], summary["repeated_steps"], summary["restarts"]) == (2, 2, 1)
    parts = [summary[f"{name}_s"] for name in ("tracing", "saves", "evaluation", "end", "other")]
    assert parts == [5, 1, 1, 2, 0]
    assert sum(v for n, v in summary.items() if n.endswith("_s") and n != "wall_s") == 40
    text = goodput.describe(summary)
    assert text.startswith("goodput 15%: new steps took 6.0 s of 40.0 s; start 10.0 s, ")
    assert "repeated 2.0 s (2 steps)" in text


def test_starts_that_never_train():
    whole = Goodput(0.0)
    whole.add(None, 4.0)
    old = Account(1.0, 2.0, (1.0, 0.0, 0.0), 0.0, {})
    whole.add(old, 6.0)  # of the start before
    summary = whole.summary(10.0)
    assert (summary["start_s"], summary["restart_s"], summary["end_s"]) == (4, 2, 4)
    assert summary["goodput"] == 0
