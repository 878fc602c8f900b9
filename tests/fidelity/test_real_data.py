"""A strategy that compresses gradients learns real data as exact training does."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.selection import cases

HERE = pathlib.Path(__file__).parent
# Scales of blocks, a single place of a short bias and the like are in these.
RATIOS = {"bf16": 2.0, "int8": 3.77, "topk:0.01": 34.2, "powersgd:4": 6.16, "factors:bf16": 2.88}


@pytest.fixture(scope="module")
def results(request):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment.pop("TF_CONFIG", None)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    end = subprocess.run(
        [
            sys.executable,
            str(HERE / "digits_job.py"),
            "none",
            *cases(request, argument="compression"),
        ],
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=560,
    )
    assert end.returncode == 0, end.stdout[-2000:] + end.stderr[-4000:]
    (line,) = [line for line in end.stdout.splitlines() if line.startswith("results: ")]
    return json.loads(line.removeprefix("results: "))


def test_exact_training_learns(results):
    assert results["none"]["replicas"] == 2
    assert results["none"]["ratio"] == 1
    assert results["none"]["accuracy"] > 0.95


@pytest.mark.parametrize("compression", RATIOS)
def test_compressed_training_learns_as_much(results, compression):
    result = results[compression]
    assert result["accuracy"] > results["none"]["accuracy"] - 0.015
    # It was another training, then, and less was sent.
    assert result["weights"] != results["none"]["weights"]
    assert result["ratio"] == pytest.approx(RATIOS[compression], rel=0.01)
