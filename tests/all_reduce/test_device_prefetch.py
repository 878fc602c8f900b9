"""Batches that are on their devices before a step are the same ones."""

import json
import pathlib

import pytest

from keras_psplus.cluster.testing import run_in_processes

JOB = pathlib.Path(__file__).with_name("device_prefetch_job.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("prefetch") / "results.json"
    run_in_processes(JOB, workers=2, timeout=300, args=[path])
    return json.loads(path.read_text())


@pytest.mark.parametrize("data", ["arrays", "dataset", "several"])
def test_batches_are_the_same_on_their_devices_as_in_the_step(data, results):
    assert results[f"{data} True"] == results[f"{data} False"]
