"""`fit`'s arguments and Keras's callbacks mean under parameter servers what they mean without."""

import json
import pathlib
import re

import pytest

from keras_psplus.cluster.testing import run_in_processes
from tests.selection import cases

JOB = pathlib.Path(__file__).with_name("callbacks_job.py")
BEHAVIOURS = re.findall(r"^@behaviour\ndef (\w+)\(", JOB.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    """What each behaviour raised, and the log of the chief."""
    folder = tmp_path_factory.mktemp("callbacks")
    logs = run_in_processes(
        JOB,
        workers=2,
        ps=1,
        chief=True,
        timeout=560,
        env={"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""},
        args=[folder, *cases(request, argument="name")],
    ).logs
    return json.loads((folder / "failures.json").read_text()), logs["chief-0"]


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_behaviour(name, job):
    failures, log = job
    assert name in failures, log[-8000:]
    assert not failures[name], failures[name]
