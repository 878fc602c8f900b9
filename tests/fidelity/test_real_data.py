"""A strategy that compresses gradients learns real data as exact training does."""

import json
import pathlib

import pytest

from tests.selection import cases
from tests.support.jobs import run_script
from tests.support.tiers import extended

JOB = pathlib.Path(__file__).with_name("digits_job.py")
# Scales of blocks, a single place of a short bias and the like are in these.
RATIOS = {"topk:0.01": 34.2, "int8": 3.77, "powersgd:4": 6.16, "bf16": 2.0, "factors:bf16": 2.88}
FIRST, *REST = RATIOS

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def results(request):
    names = cases(request, argument="compression")
    output = run_script(JOB, 3 if len(names) > 1 else 1, "none", *names)
    (line,) = [line for line in output.splitlines() if line.startswith("results: ")]
    return json.loads(line.removeprefix("results: "))


def test_exact_training_learns(results):
    assert results["none"]["replicas"] == 2
    assert results["none"]["ratio"] == 1
    assert results["none"]["accuracy"] > 0.95


@pytest.mark.parametrize("compression", [FIRST, *extended(*REST)])
def test_compressed_training_learns_as_much(results, compression):
    result = results[compression]
    # One seed's accuracy is off by up to two in a hundred.
    tolerance = 0.015 if len(results) > 2 else 0.035
    assert result["accuracy"] > results["none"]["accuracy"] - tolerance
    # It was another training, then, and less was sent.
    assert result["weights"] != results["none"]["weights"]
    assert result["ratio"] == pytest.approx(RATIOS[compression], rel=0.01)
