"""Train steps compiled in parts: equal to one process, and gradients leave between parts."""

import json
import pathlib

import numpy as np
import pytest

import keras_psplus as psp
from keras_psplus.cluster.testing import run_in_processes

JOB = pathlib.Path(__file__).with_name("jit_blocks_job.py")
# As many as the job asks for.
PARTS = 3
NAMES = ["mlp", "transformer", "Own"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jit_blocks")
    result = run_in_processes(JOB, workers=2, timeout=560, args=[folder])
    return {task: json.loads((folder / f"{task}.json").read_text()) for task in result.logs}


@pytest.mark.parametrize("name", NAMES)
def test_two_workers_equal_one_compiled_process(name, results):
    one = results["worker-0"][f"{name} alone"]
    for found in results.values():
        two = found[name]
        assert set(two["logs"]) == set(one["logs"])
        for key, values in one["logs"].items():
            np.testing.assert_allclose(two["logs"][key], values, rtol=2e-5, atol=2e-5, err_msg=key)
        for weights, expected in zip(two["weights"], one["weights"], strict=True):
            np.testing.assert_allclose(weights, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_first_gradients_are_summed_before_backprop_has_ended(name, results):
    for found in results.values():
        steps = found[f"{name} waits"]
        assert steps
        for step in steps:
            assert step["parts"] == PARTS
            assert set(step["waits"]) >= set(range(1, PARTS + 1))


@pytest.mark.parametrize("number", [0, 1, 2.0, True, "2"])
def test_numbers_of_parts(number):
    with pytest.raises(ValueError, match="`jit_blocks` must be an int from 2 up. Received: jit_"):
        psp.MultiWorkerMirroredStrategy(jit_blocks=number)


def test_parts_of_nothing_are_refused():
    with pytest.raises(ValueError, match="cannot be combined with `shard=.all.*Received: jit_b"):
        psp.MultiWorkerMirroredStrategy(jit_blocks=2, shard="all")
