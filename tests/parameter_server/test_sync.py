"""Synchronous and bounded steps in real processes: equal to one process, and to themselves."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from keras_psplus.cluster.testing import run_in_processes
from keras_psplus.parameter_server.sync.sync_steps import split
from tests.multi_process import fit_cases
from tests.parameter_server.sync_job import by_hand
from tests.parameter_server.waiting import cluster_that_goes_on, wait_for
from tests.support.results import assert_close, load

HERE = pathlib.Path(__file__).parent
JOB = HERE / "sync_job.py"
# Many more are compared in one process, in tests/multi_process.
CASES = ["last_batch_of_one_row", "much_at_once", "mixed_precision_skips_overflow"]
TOLERANCE = {"mixed_precision_skips_overflow": 2e-3}
STEPS = 160
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What the cases come to in plain Keras."""
    folder = tmp_path_factory.mktemp("reference")
    fit_cases.run(CASES, None, "reference", folder)
    return folder


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder and the log of `killed`."""
    return killed(tmp_path_factory.mktemp("sync"), CASES)


@pytest.fixture(scope="module")
def overlapping_job(tmp_path_factory):
    """The same with steps that overlap; `sync_overlap_job.py` has more cases."""
    return killed(tmp_path_factory.mktemp("overlapping"), [], "overlap")


def killed(folder, cases, *options):
    """The folder of a job whose two workers are killed, one after the other has come back."""
    file = folder / "file"
    command = [sys.executable, JOB, STEPS, file, folder, ",".join(cases), *options]
    command = [str(word) for word in command]
    with cluster_that_goes_on(command, ENVIRONMENT, folder) as cluster:
        chief = cluster.log_path("chief-0")
        wait_for(chief, "batch 20.", seconds=150)
        environment = cluster.environment("worker-1")
        os.kill(cluster.pids["worker-1"], signal.SIGKILL)
        log = folder / "again"
        with log.open("w") as out:
            again = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        try:
            wait_for(log, "worker-1 serves")
            file.touch()
            wait_for(chief, "worker-1 is back")
            os.kill(cluster.pids["worker-0"], signal.SIGKILL)
            wait_for(chief, "\nresult {")
            assert again.wait(30) == 0, log.read_text()
        finally:
            again.kill()
    return folder, chief.read_text()


def test_shares_have_rows():
    ((weight, part),) = split((tf.ones([1, 2]), tf.ones([1])), 2)
    assert weight == 1.0 and part[0].shape == (1, 2)
    # Or there would be no step.
    batch = tf.ones([0, 2]), tf.ones([0])
    ((weight, part),) = split(batch, 2)
    assert weight == 1.0 and part is batch


@pytest.mark.parametrize("case", CASES)
def test_two_workers_equal_one_process(case, job, reference):
    folder, log = job
    expected = load(reference / f"{case}.reference.npz", log)
    found = load(folder / f"{case}.cluster.npz", log)
    assert_close(found, expected, TOLERANCE.get(case, 2e-5))


@pytest.mark.parametrize("how", ["job", "overlapping_job"])
def test_workers_are_killed_and_no_update_is_wrong(how, request):
    _, log = request.getfixturevalue(how)
    for lost, other in ((1, 0), (0, 1)):
        assert re.search(
            rf"worker-{lost} was lost with batch \d+ .*; worker-{other} takes it once more, and no "
            "gradient counts twice",
            log,
        ), log
    assert re.search(r"batch \d+ .* begins again, because a worker was lost with it", log), log
    found = re.search(r"^result (.*)$", log, re.MULTILINE)
    assert found, log[-4000:]
    result = json.loads(found[1])
    assert result["iterations"] == result["steps"] == STEPS
    # At least before the first is killed: while a worker is away, steps do not overlap.
    assert (result["overlapped"] >= 15) == (how == "overlapping_job"), result
    for name, expected in by_hand(STEPS).items():
        np.testing.assert_allclose(result[name], expected, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def stragglers(tmp_path_factory):
    """What two workers have done in each mode, of which one takes many times as long."""
    modes = ["sync", "backup", "async", "shares", "equal", "stale:2", "stale:0", "shares:2"]
    log = run_in_processes(
        HERE / "straggler_job.py",
        workers=2,
        ps=1,
        chief=True,
        timeout=560,
        env=ENVIRONMENT,
        args=[tmp_path_factory.mktemp("stragglers"), *modes],
    ).logs["chief-0"]
    found = {mode: re.search(rf"^{mode} (.*)$", log, re.MULTILINE) for mode in modes}
    assert all(found.values()), log[-4000:]
    return {mode: json.loads(line[1]) for mode, line in found.items()}, log


def test_synchronous_steps_wait_for_a_slow_worker(stragglers):
    found = stragglers[0]["sync"]
    # Half of each batch was each worker's.
    assert found["taken"] == [8, 8]
    assert found["steps"] == 16
    assert found["dropped"] == 0


def test_backup_workers_do_not_wait_for_a_slow_worker(stragglers):
    (found, log), fast, slow = stragglers, 0, 1
    taken = found["backup"]["taken"]
    # Every step counts one gradient, nearly always the fast worker's.
    assert sum(taken) == found["backup"]["steps"] == 16
    assert taken[fast] > 4 * taken[slow]
    # Those of the step before the measured ones as well.
    assert found["backup"]["dropped"] == 17
    assert re.search(r"17 gradients of 17 steps came late and were dropped \(.*worker-1: ", log), (
        log
    )


@pytest.mark.parametrize("mode", ["async", "shares"])
def test_asynchronous_steps_do_not_wait_for_a_slow_worker(mode, stragglers):
    found = stragglers[0][mode]
    assert found["counted"] == found["taken"]
    assert sum(found["taken"]) == found["steps"] == 16
    assert found["taken"][0] > 1.5 * found["taken"][1]
    assert found["ahead"][0] > 2


def test_equally_fast_workers_take_as_many_steps(stragglers):
    assert stragglers[0]["equal"]["counted"] == [8, 8]


@pytest.mark.parametrize("mode", ["stale:2", "stale:0", "shares:2"])
def test_staleness_is_bounded(mode, stragglers):
    found = stragglers[0][mode]
    assert sum(found["taken"]) == found["steps"] == 16
    # Without the bound, the fast worker gets further ahead; with it, just as far.
    assert max(found["ahead"]) == int(mode.partition(":")[2])
