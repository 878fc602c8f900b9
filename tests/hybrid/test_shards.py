"""Tables on servers beside an optimizer's state in shares equal one process."""

import re

import pytest

import keras_psplus as psp
from tests.hybrid.reference import check_equals_reference, run_beside_reference
from tests.hybrid.test_training import JOB
from tests.hybrid.training_job import CASES
from tests.selection import cases
from tests.support.tiers import extended

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]

MORE = ["adam_w", "global_clipnorm", "clipnorm", "own_step", "own_optimizer", "mixed_precision"]
MORE += ["accumulated"]


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    """Where all have left what the cases come to, and the logs of the cluster."""
    folder, names = tmp_path_factory.mktemp("shards"), cases(request)
    return folder, run_beside_reference(JOB, folder, names, "--shard")


@pytest.mark.parametrize("case", ["beside_rows", "again", *extended(*MORE)])
def test_equals_one_process(job, case):
    check_equals_reference(*job, case, CASES[case].tolerance)


@pytest.mark.cases("again")
def test_each_worker_keeps_a_part_of_what_is_no_table(job):
    # Two kernels and two biases.
    start = job[1]["worker-0"].partition("'nadam' in shares: the slots of 4 variables are cut")[2]
    parts = dict(re.findall(r"\n(?:.*\] )?(worker-\d) +[\d.]+ +(\d+)%", start)[:2])
    assert parts == {"worker-0": "50", "worker-1": "50"}


@pytest.mark.parametrize(
    "given, text",
    [
        (dict(shard="all"), 'HybridStrategy takes shard="optimizer"'),
        (dict(shard="weights"), "`shard` must be"),
        (dict(shard_group=2), "`shard_group` is for `shard`"),
        (dict(compression={"weights": "bf16"}), "are keys of `compression` with `shard`"),
        (dict(shard="optimizer", compression="topk:0.1"), "gradients can be sent by"),
    ],
)
def test_refused(given, text):
    with pytest.raises(ValueError, match=re.escape(text)) as error:
        psp.HybridStrategy(**given)
    assert "Received: " in str(error.value)


def test_one_process_has_nothing_to_cut():
    assert psp.HybridStrategy(shard="optimizer").num_replicas_in_sync == 1
