"""Training with a dynamic table on parameter servers equals training in one process."""

import pathlib
import types

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.hybrid.tables.dynamic import _ServerPart
from keras_psplus.tables import policies
from keras_psplus.tables.admission import counters_of_block
from keras_psplus.tables.keys import BLOCKS
from tests.hybrid import dynamic_job
from tests.hybrid.reference import check_equals_reference, run_beside_reference
from tests.selection import cases
from tests.support.tiers import extended

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]

JOB = pathlib.Path(__file__).with_name("dynamic_job.py")


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    """Where all have left what the cases come to, and the logs of the cluster."""
    folder, wanted = tmp_path_factory.mktemp("dynamic"), cases(request)
    names = [name for name in dynamic_job.CASES if name in wanted]
    return folder, run_beside_reference(JOB, folder, names)


@pytest.mark.parametrize("case", ["counted", *extended("plain", "filtered", "keras_rs")])
def test_equals_one_process(job, case):
    folder, logs = job
    assert len(np.load(folder / f"{case}-reference.npz")["table_keys"])
    check_equals_reference(folder, logs, case, 2e-5)


@pytest.mark.parametrize(
    ("admit", "expected"),
    [
        (None, []),
        (policies.Count(2), ["insert_candidates"]),
        (policies.Bloom(2, 10**5), ["set_filter"]),
        (policies.Bloom(2, 10**6), []),
    ],
)
def test_a_server_takes_the_counts_of_its_own_policy_from_a_file(admit, expected):
    asked = []

    def call(what, *_):
        asked.append(what)
        return tf.zeros([])

    link = types.SimpleNamespace(call=call)
    spec = {"admit": policies.check_admit(admit)}
    table = types.SimpleNamespace(dim=2, spec=spec, servers=[0], method=lambda what: what)
    blocks = np.ones([BLOCKS, counters_of_block({"bits": 10**5})], np.uint8)
    _ServerPart(table, 0, link).set_counters(np.ones([3, 4], np.int64), blocks)
    assert asked == expected
