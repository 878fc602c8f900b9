"""Shares with other arguments of the strategy: accumulated gradients, and compressors."""

import json
import pathlib

import pytest

from tests.sharding.options_job import ACCUMULATED
from tests.sharding.test_shares import check, train_alone, train_in_cluster

pytestmark = pytest.mark.timeout(1500)

JOB = pathlib.Path(__file__).with_name("options_job.py")
CASES = [f"accumulated/{name}" for name in ACCUMULATED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("options")


@pytest.fixture(scope="module")
def alone(folder):
    return train_alone(folder / "alone", CASES, JOB)


@pytest.fixture(scope="module", params=["optimizer", "all"])
def accumulating(request, folder):
    options = json.dumps({"shard": request.param, "updates": "accumulate"})
    return train_in_cluster(folder / request.param, 2, CASES, JOB, env={"OPTIONS": options})


@pytest.mark.parametrize("case", CASES)
def test_accumulated_updates_equal_those_of_one_process(alone, accumulating, case):
    check(alone, accumulating, case, 2e-5)
