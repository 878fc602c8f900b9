"""Training with a dynamic table on parameter servers equals training in one process."""

import json
import os
import pathlib
import re
import signal
import sys

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.parameter_server.tracing.worker_function import Trace
from tests.hybrid import dynamic_job
from tests.hybrid.reference import ENVIRONMENT, running_reference
from tests.parameter_server.dynamic_job import by_hand, data
from tests.parameter_server.waiting import cluster_that_goes_on, wait_for
from tests.selection import cases
from tests.support.results import load

STEPS = 300


@pytest.fixture(scope="module")
def job(request, tmp_path_factory):
    """Where the chief and one process have left what the cases come to, and the chief's log."""
    folder, wanted = tmp_path_factory.mktemp("dynamic"), cases(request)
    names = ",".join(name for name in dynamic_job.CASES if name in wanted)
    script = pathlib.Path(__file__).with_name("dynamic_job.py")
    command = [str(word) for word in (sys.executable, script, folder, names, STEPS)]
    with (
        running_reference(dynamic_job.__file__, folder, names, seconds=300),
        cluster_that_goes_on(command, ENVIRONMENT, folder, ps=2) as cluster,
    ):
        chief = cluster.log_path("chief-0")
        process = cluster.pids["chief-0"]
        wait_for(chief, "batch 21.", 400, process)
        os.kill(cluster.pids["worker-1"], signal.SIGKILL)
        wait_for(chief, "worker-1 was lost with batch", process=process)
        (folder / "file").touch()
        wait_for(chief, "\nresult {", process=process)
    return folder, chief.read_text()


@pytest.mark.parametrize("case", dynamic_job.CASES)
def test_synchronous_training_equals_one_process(job, case):
    folder, log = job
    expected = np.load(folder / f"{case}-reference.npz")
    found = load(folder / f"{case}-chief-0.npz", log)
    assert sorted(found) == sorted(expected) and len(found["table_keys"])
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.cases("counted")
def test_an_exported_model_predicts_the_same(job):
    folder, log = job
    ids = dynamic_job.as_ids("counted", dynamic_job.data()[0][:21])
    exported = tf.saved_model.load(folder / "exported")
    expected = load(folder / "counted-chief-0.npz", log)["predicted"]
    np.testing.assert_allclose(exported.serve(ids), expected, atol=1e-6)


@pytest.mark.cases("counted", others=True)
def test_a_worker_is_killed_and_each_asynchronous_update_counts_once(job):
    _, log = job
    result = json.loads(re.search(r"^result (.*)$", log, re.MULTILINE)[1])
    rows, counts = by_hand(STEPS)
    assert result["keys"] == sorted(set(data(STEPS)[0].ravel().tolist()))
    assert result["counts"] == counts.tolist()
    np.testing.assert_allclose(result["rows"], rows, rtol=1e-5)
    known = dict(zip(result["keys"], rows))
    expected = [sum(known[key] for key in line) for line in data(1)[0].tolist()]
    np.testing.assert_allclose(result["predicted"], expected, rtol=1e-5)


def test_an_asynchronous_step_applies_a_gradient_once_and_always():
    @tf.function
    def step(initial):
        trace, table = Trace(initial), object()
        number = trace.keep(table, "t")
        for other in (table, object()):
            with pytest.raises(ValueError, match="Received: the table 't'"):
                tf.cond(number > 0, lambda other=other: trace.keep(other, "t"), lambda: number)
        with pytest.raises(ValueError, match="once"):
            trace.keep(table, "t")
        return number

    assert step(tf.constant([0.5, 17.0], tf.float64)).numpy() == 17
