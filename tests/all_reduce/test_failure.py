"""Which of TensorFlow's errors are laid at another worker's door."""

import pytest
import tensorflow as tf

from keras_psplus.all_reduce import failure
from keras_psplus.cluster.config import TaskConfig

TASK = TaskConfig({"worker": ("127.0.0.1:1", "127.0.0.1:2")}, "worker", 1)


def raise_as(monkeypatch, message):
    monkeypatch.setattr(failure, "_lost_peers", lambda task: [])
    monkeypatch.setattr(failure, "_failed_at", None)
    with failure.explained(TASK):
        raise tf.errors.InvalidArgumentError(None, None, message)


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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
