"""A strategy that the library does not have, in one file of a user's own."""

import json
import pathlib
import re

import pytest

from keras_psplus.cluster.testing import run_in_processes

FILE = pathlib.Path(__file__).with_name("averaging.py")
RATE, STEPS = 0.1, 3


def by_hand():
    """Each weight is trained by one of two workers; both have the mean after each epoch."""
    weight = 0.0
    for _ in range(2):
        error = (1 - weight) * (1 - 2 * RATE) ** STEPS
        weight = (weight + 1 - error) / 2
    return [weight, weight]


def test_it_is_one_small_file():
    assert len(FILE.read_text().splitlines()) <= 60


def test_fit_averages_weights_after_each_epoch_in_two_processes():
    logs = run_in_processes(FILE, workers=2, timeout=120).logs
    for log in logs.values():
        found = dict(re.findall(r"^(weights|rows) (.*)$", log, re.MULTILINE))
        assert sorted(found) == ["rows", "weights"]
        for weights in found.values():
            # One row of an embedding is what a row of ones has for a weight.
            assert json.loads(weights) == pytest.approx(by_hand(), abs=1e-6)
