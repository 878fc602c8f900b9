"""The line of TensorFlow's errors that says what has happened, and ends that others are told of."""

import sys

import pytest

from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.process import signals
from keras_psplus.core.jobs import failure
from tests.support.tables import for_each

SAYS = "ps-0 (localhost:1): no answer in time; it hangs, or the link is too slow"
WHERE = """Graph execution error:

Detected at node StatefulPartitionedCall defined at (most recent call last):
  File "job.py", line 148, in main
    model.fit(data)

"""


@for_each(
    "text, line",
    [
        (SAYS, SAYS),
        (f"{WHERE}{SAYS}\n\t [[{{{{node call}}}}]]", SAYS),
        (
            f"{WHERE}2 root error(s) found.\n(0) UNKNOWN: {SAYS}\n(1) CANCELLED: x",
            f"(0) UNKNOWN: {SAYS}",
        ),
        (
            f"{WHERE}Collective ops is aborted by: Socket closed",
            "Collective ops is aborted by: Socket closed",
        ),
        ("", "RuntimeError"),
    ],
)
def test_the_line_that_says_it(text, line):
    assert failure._first_line(RuntimeError(text)) == line


@pytest.mark.parametrize(
    "code, is_cause, told",
    [(3, True, True), ("no", True, True), (0, True, False), (3, False, False)],
)
def test_others_are_told_of_an_exit_code_of_failure(code, is_cause, told, monkeypatch):
    messages = []
    monkeypatch.setattr(failure, "report", lambda message, post: messages.append(message))
    monkeypatch.setattr(failure, "_reported_at", None)
    monkeypatch.setattr(signals.EXITS, "codes", [0, code])
    monkeypatch.delattr(sys, "last_value", raising=False)
    task = TaskConfig({"worker": ("h:1", "h:2")}, "worker", 1)
    failure._at_exit(task, lambda: is_cause, None)
    message = f"worker-1 (h:2) has ended early. Received: exit code {code}"
    assert messages == ([f"{failure.ENDED}{message}"] if told else [])
