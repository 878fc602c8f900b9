"""Bytes that a pipeline counts, beside those that can be computed by hand."""

import collections
import json
import os
import pathlib
import subprocess
import sys

import pytest

from keras_psplus.cluster.environment import python_path
from tests.pipeline.communication_job import CLASSES, INPUTS, LENGTHS, ROWS, WIDTH

JOB = pathlib.Path(__file__).with_name("communication_job.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
# Of float32. The third layer gets the activations of the second.
CROSSING = ROWS * WIDTH * 4
KERNELS = [INPUTS * WIDTH, WIDTH * WIDTH, WIDTH * WIDTH, WIDTH * CLASSES]
BIASES = 3 * WIDTH + CLASSES
WEIGHTS = 4 * (sum(KERNELS) + BIASES)
STEPS = 2
FORWARD, BACKWARD = ("stage 0 -> stage 1", "forward"), ("stage 1 -> stage 0", "backward")
# One pipeline has half of the rows.
OUTPUTS = ROWS // 2 * CLASSES * 4


@pytest.fixture(scope="module")
def counted():
    process = subprocess.run(
        [sys.executable, str(JOB)],
        capture_output=True,
        text=True,
        timeout=560,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path(os.environ)},
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout.splitlines()[-1])


def by_direction(case):
    """Logical and compressed bytes, by direction; paths of pipelines count as a direction."""
    sums = collections.defaultdict(lambda: [0, 0])
    for path, direction, _, logical, compressed, wire in case["rows"]:
        assert wire == compressed
        key = (path, direction) if direction in ("forward", "backward") else direction
        sums[key][0] += logical
        sums[key][1] += compressed
    return dict(sums)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream"])
def test_activations_and_their_gradients(schedule, counted):
    case = counted[schedule]
    assert by_direction(case) == {FORWARD: [CROSSING] * 2, BACKWARD: [CROSSING] * 2}
    assert case["bytes"] == [2 * CROSSING / STEPS]
    assert case["ratio"] == [1.0]


def test_activation_compression(counted):
    # Micro-batches of the second batch have fewer than 1,024 numbers, and go as they are.
    small = CROSSING // 5
    large = CROSSING - small
    expected = {
        (*way, *numbers)
        for way in (FORWARD, BACKWARD)
        for numbers in (("Cast()", large, large // 2), (None, small, small))
    }
    assert {tuple(row[:-1]) for row in counted["bf16"]["rows"]} == expected
    assert counted["bf16"]["ratio"] == [CROSSING / (large // 2 + small)]


def test_sums_of_residual_connections_go_nowhere(counted):
    # The activations of the first layer and of the second.
    found = by_direction(counted["residual"])
    assert found == {FORWARD: [2 * CROSSING] * 2, BACKWARD: [2 * CROSSING] * 2}


def test_sequences_of_changing_lengths(counted):
    crossing = ROWS * sum(LENGTHS) * WIDTH * 4
    found = by_direction(counted["sequences"])
    assert found == {FORWARD: [crossing] * 2, BACKWARD: [crossing] * 2}


def test_pipelines(counted):
    assert by_direction(counted["pipelines"]) == {
        FORWARD: [CROSSING] * 2,
        BACKWARD: [CROSSING] * 2,
        "gradient": [STEPS * WEIGHTS] * 2,
        "weight": [STEPS * WEIGHTS] * 2,
        # The loss is that of the whole batch.
        ("pipeline 1 -> pipeline 0", "forward"): [OUTPUTS] * 2,
        ("pipeline 0 -> pipeline 1", "backward"): [OUTPUTS] * 2,
    }
    paths = {path for path, direction, *_ in counted["pipelines"]["rows"] if direction == "weight"}
    assert paths == {f"stack/{layer}/{name}" for layer in "abcd" for name in ("kernel", "bias")}


def test_gradients_between_pipelines_are_compressed(counted):
    # A float32 for each block of 256 elements; vectors go as they are.
    kernels = sum(size + 4 * -(-size // 256) for size in KERNELS)
    assert by_direction(counted["int8"]) == {
        FORWARD: [CROSSING] * 2,
        BACKWARD: [CROSSING] * 2,
        "gradient": [STEPS * WEIGHTS, STEPS * (kernels + 4 * BIASES)],
        "weight": [STEPS * WEIGHTS] * 2,
        # Outputs for metrics, and targets (float64), which metrics and the loss use.
        ("pipeline 1 -> pipeline 0", "forward"): [OUTPUTS] * 2,
        ("pipeline 0 -> pipeline 1", "backward"): [ROWS // 2 * 8] * 2,
    }
