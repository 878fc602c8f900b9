"""What the chief says of a worker that is gone."""

import socket
import types

import pytest
import tensorflow as tf

from keras_psplus.errors import StageLostError
from keras_psplus.pipeline.engine import translate_errors


def test_an_error_that_names_no_worker_is_about_the_one_that_does_not_answer():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    task = types.SimpleNamespace(cluster={"worker": [address]})
    strategy = types.SimpleNamespace(task=task, num_stages=1, pipelines=1, plan=None)
    with pytest.raises(StageLostError, match=f"worker-0 .{address}.*Received: Socket"):
        with translate_errors(strategy):
            raise tf.errors.UnavailableError(None, None, "Socket closed")


def test_errors_outside_of_a_cluster_stay_as_they_are():
    strategy = types.SimpleNamespace(task=None)
    with pytest.raises(tf.errors.UnavailableError, match="Socket closed"):
        with translate_errors(strategy):
            raise tf.errors.UnavailableError(None, None, "Socket closed")
