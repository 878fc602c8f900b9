"""What a task chooses for the libraries below TensorFlow, and what it leaves to the user."""

import os

import pytest
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context

from keras_psplus.cluster.process import memory, tuning


@pytest.mark.parametrize("chosen", [None, "", "event_engine_dns"])
def test_choice_of_the_user_stays(monkeypatch, chosen):
    told = []
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: told.append(True))
    # Set first in any case: a variable that was not there would stay as `tune` leaves it.
    monkeypatch.setenv("GRPC_EXPERIMENTS", chosen or "")
    if chosen is None:
        monkeypatch.delenv("GRPC_EXPERIMENTS")
    tuning.tune()
    expected = "tcp_frame_size_tuning,tcp_rcv_lowat" if chosen is None else chosen
    assert os.environ["GRPC_EXPERIMENTS"] == expected
    assert told


@pytest.mark.parametrize("processors, sleeps", [({3}, True), ({0, 1}, False)])
@pytest.mark.parametrize("chosen", [None, config_pb2.ConfigProto(inter_op_parallelism_threads=7)])
def test_threads_do_not_spin_on_the_only_processor(monkeypatch, processors, sleeps, chosen):
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: True)
    monkeypatch.setenv("GRPC_EXPERIMENTS", "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: processors)
    monkeypatch.setattr(context.context(), "_config", chosen)
    tuning.tune()
    config = context.context().config
    assert config.experimental.disable_thread_spinning == sleeps
    assert config.inter_op_parallelism_threads in ((7,) if chosen else (0, 1, 2))
