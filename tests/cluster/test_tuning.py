"""What a task chooses for the libraries below TensorFlow, and what it leaves to the user."""

import os

import pytest

from keras_psplus.cluster import memory, tuning


@pytest.mark.parametrize("chosen", [None, "", "event_engine_dns"])
def test_choice_of_the_user_stays(monkeypatch, chosen):
    told = []
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: told.append(True))
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("GRPC_EXPERIMENTS", chosen)
    tuning.tune()
    expected = "tcp_frame_size_tuning,tcp_rcv_lowat" if chosen is None else chosen
    assert os.environ["GRPC_EXPERIMENTS"] == expected
    assert told
