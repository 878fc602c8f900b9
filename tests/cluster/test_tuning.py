"""What a task chooses for the libraries below TensorFlow, and what it leaves to the user."""

import os

import pytest

from keras_psplus.cluster import memory, tuning


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
