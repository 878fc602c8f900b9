"""Which of TensorFlow's errors are laid at another worker's door."""

import sys

import pytest
import tensorflow as tf

from keras_psplus.cluster.config import TaskConfig
from keras_psplus.cluster.process import signals
from keras_psplus.core.jobs import failure
from keras_psplus.engine import Call
from tests.support.tables import for_each

TASK = TaskConfig({"worker": ("127.0.0.1:1", "127.0.0.1:2")}, "worker", 1)


def raise_as(monkeypatch, message):
    monkeypatch.setattr(failure, "_lost_peers", lambda task: [])
    monkeypatch.setattr(failure, "_failed_at", None)
    monkeypatch.setattr(failure, "_ended_address", None)
    with failure.translate_errors(TASK):
        raise tf.errors.InvalidArgumentError(None, None, message)


@for_each(
    "message",
    [
        "label value of 12 is outside the valid range of [0, 10)",
        "{{function_node __wrapped__Op_device_/job:worker/replica:0/task:1/device:CPU:0}} wrong",
        "Multiple devices [/job:worker/replica:0/task:1/device:CPU:0, "
        "/job:localhost/replica:0/task:0/device:CPU:0]",
    ],
)
def test_errors_of_this_task_stay_what_they_are(monkeypatch, message):
    with pytest.raises(tf.errors.InvalidArgumentError):
        raise_as(monkeypatch, message)


@for_each(
    "message",
    [
        "Error reported from /job:worker/replica:0/task:0: ended",
        "Error reported from /job:worker/task:0: ended",
        "missed heartbeat",
    ],
)
def test_errors_that_speak_of_another_task_are_explained(monkeypatch, message):
    with pytest.raises(failure.PeerLostError, match=r"Another worker.*Received: "):
        raise_as(monkeypatch, message)


def test_an_error_that_another_task_reported_is_named(monkeypatch):
    reported = failure._message(TASK, "by an error", "ArithmeticError: 1 / 0. Really")
    with pytest.raises(failure.PeerLostError) as raised:
        raise_as(
            monkeypatch,
            f"Collective ops is aborted by: Error reported from /job:worker/task:1: {reported}"
            " [type.googleapis.com/tensorflow.CoordinationServiceError='\\x18']\nThe error could",
        )
    text = str(raised.value)
    assert text.startswith("worker-1 (127.0.0.1:2) has ended by an error, and worker-1 cannot go")
    assert text.endswith("Received: ArithmeticError: 1 / 0. Really")


@pytest.mark.parametrize(
    "error, cause",
    [
        (ArithmeticError("first\nsecond"), "ArithmeticError: first"),
        (
            ValueError('Graph execution error:\n\nDetected at node A\n  File "a"\n\nlabel 7\n'),
            "ValueError: label 7",
        ),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError("x" * 999), "ValueError: " + "x" * 288),
    ],
)
def test_what_is_reported_of_an_exception(monkeypatch, error, cause):
    sent, shown = [], []
    monkeypatch.setattr(failure, "report", lambda message, post: sent.append(message))
    monkeypatch.setattr(failure.atexit, "register", lambda *_: None)
    monkeypatch.setattr(signals.UNCAUGHT, "reporters", [])
    causes = [True, False]  # the second time, it is another one's failure
    failure.report_failure(TASK, lambda: causes.pop(0))

    def show():
        signals.UNCAUGHT.show(Call(lambda *args: shown.append(args), type(error), (error, None)))

    for _ in range(2):
        show()
    assert sent == [
        f"keras_psplus ended: worker-1 (127.0.0.1:2) has ended by an error. Received: {cause}"
    ]
    assert shown == [(type(error), error, None)] * 2
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    causes.append(True)
    show()
    assert len(sent) == 1 and len(shown) == 3
