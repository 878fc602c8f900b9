"""`fit`'s arguments and Keras's callbacks mean under parameter servers what they mean without."""

import json
import pathlib
import re

import pytest

from keras_psplus.cluster.testing import run_in_processes

JOB = pathlib.Path(__file__).with_name("callbacks_job.py")
BEHAVIOURS = re.findall(r"^@behaviour\ndef (\w+)\(", JOB.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What each behaviour raised."""
    folder = tmp_path_factory.mktemp("callbacks")
    run_in_processes(
        JOB,
        workers=2,
        ps=1,
        chief=True,
        timeout=200,
        env={"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
        args=[folder],
    )
    return json.loads((folder / "failures.json").read_text())


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_behaviour(name, failures):
    assert not failures[name], failures[name]
