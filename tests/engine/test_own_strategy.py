"""A strategy that the library does not have, in one file of a user's own."""

import json
import pathlib
import re

import pytest

from tests.support.jobs import run_in_processes
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

FOLDER = pathlib.Path(__file__).parent
RATE, STEPS = 0.1, 3


def by_hand():
    """Each weight is trained by one of two workers; both have the mean after each epoch."""
    weight = 0.0
    for _ in range(2):
        error = (1 - weight) * (1 - 2 * RATE) ** STEPS
        weight = (weight + 1 - error) / 2
    return [weight, weight]


# The neighbour of one of two is the other.
@pytest.mark.parametrize("name", ["averaging", *extended("gossip")])
def test_fit_averages_weights_after_each_epoch_in_two_processes(name):
    logs = run_in_processes(FOLDER / f"{name}.py", workers=2, timeout=560).logs
    for log in logs.values():
        found = dict(re.findall(r"^(weights|rows) (.*)$", log, re.MULTILINE))
        assert sorted(found) == ["rows", "weights"]
        for weights in found.values():
            # One row of an embedding is what a row of ones has for a weight.
            assert json.loads(weights) == pytest.approx(by_hand(), abs=1e-6)
