"""Datasets that the workers read: each element once an epoch; `test_jobs.py` kills one of them."""

import pytest

from tests.parameter_server import worker_data_cases as cases
from tests.support.cluster import run
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

NUMBERS = 91


@pytest.fixture
def folder(tmp_path):
    """Files with a number in each line."""
    for i in range(5):
        lines = [str(n) for n in range(1, NUMBERS + 1) if n % 5 == i]
        (tmp_path / f"{i}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def check_that_each_was_seen_once(found):
    for power in range(3):
        expected = sum(n**power for n in range(1, NUMBERS + 1))
        assert found[f"power_{power}"].tolist() == [expected] * 3, power
    assert found["predicted"] == NUMBERS


@pytest.mark.parametrize(("policy", "steps_per_execution"), extended(("FILE", 3), ("DATA", 1)))
def test_each_element_is_seen_once_an_epoch(policy, steps_per_execution, folder):
    args = {"folder": folder, "policy": policy, "steps_per_execution": steps_per_execution}
    results = run("async22", cases.shared_by_policy, **args)
    check_that_each_was_seen_once(results.first)
    assert results.first["endless"].tolist() == [24.0, 24.0]
    assert f"each reads its own share (AutoShardPolicy.{policy})" in results.logs["chief-0"]


def test_data_that_the_script_has_distributed(folder):
    results = run("async22", cases.distributed, folder=folder)
    check_that_each_was_seen_once(results.first)
    assert "each reads what the script's function has made for it" in results.logs["chief-0"]


def test_epochs_whose_lengths_change():
    assert run("async22", cases.lengths_that_change).first["seen"].tolist() == [3.0, 9.0, 2.0]


def test_what_cannot_be_sent_is_read_by_the_chief(folder):
    results = run("async22", cases.what_cannot_be_sent, folder=folder)
    assert results.first["counts"].tolist() == [41.0] * 2
    assert results.first["sums"].tolist() == [41 * 42 / 2] * 2
    for reason in ("it reads from the tf.data service", "it uses HashTableV2"):
        said = f"this dataset cannot be sent to the workers ({reason}"
        assert said in results.logs["chief-0"]


@pytest.mark.extended
def test_the_chief_reads_what_was_distributed_where_it_decides():
    run("sync_threads", cases.the_chief_reads_where_it_decides)
