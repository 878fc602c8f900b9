"""What a step of the user's own computes with gradients is what one process computes."""

import itertools
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.testing import run_in_processes
from tests.selection import cases
from tests.support.results import load

JOB = pathlib.Path(__file__).with_name("own_steps_job.py")
CASES = re.findall(r"^@case\nclass (\w+)\(", JOB.read_text(), re.MULTILINE)
# With `updates=`, whose sums come later.
UPDATES = {"accumulate:1": ["ClipByGlobalNorm", "RowsClipped"]}
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


def in_one_process(*args):
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    environment |= ENVIRONMENT | {"PYTHONPATH": python_path(os.environ)}
    done = subprocess.run(
        [sys.executable, JOB, *map(str, args)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def alone(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own_steps")
    names = cases(request, "test_two_workers_equal_one_process", "test_with_updates_as_well")
    return folder, in_one_process(folder, *names, "--one_process")


@pytest.fixture(scope="module")
def two_workers(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_workers")
    names = cases(
        request,
        "test_two_workers_equal_one_process",
        "test_a_norm_of_what_a_loop_returns_is_refused",
        "test_weights_stay_the_same_whatever_is_drawn",
        "test_a_file_of_one_worker_within_an_accumulation_is_told",
    )
    rules = cases(request, "test_with_updates_as_well", argument="rule")
    updates = {rule: UPDATES[rule] for rule in UPDATES if rule in rules}
    args = [folder, *names, "--updates", json.dumps(updates)]
    return folder, run_in_processes(JOB, workers=2, timeout=560, env=ENVIRONMENT, args=args).logs


def check(case, alone, workers, suffix=""):
    folder, log = alone
    expected = load(folder / f"{case}-alone.npz", log)
    folder, logs = workers
    for worker in ("worker-0", "worker-1"):
        found = load(folder / f"{case}{suffix}-{worker}.npz", logs[worker])
        assert sorted(found) == sorted(expected)
        for name in expected:
            # A scaled loss has norms above 20, whose last bits are as large as the tolerance.
            np.testing.assert_allclose(
                found[name], expected[name], rtol=2e-6, atol=2e-5, err_msg=name
            )


@pytest.mark.parametrize("case", CASES)
def test_two_workers_equal_one_process(case, alone, two_workers):
    check(case, alone, two_workers)


@pytest.mark.cases(*itertools.chain(*UPDATES.values()))
@pytest.mark.parametrize("rule", UPDATES)
def test_with_updates_as_well(rule, alone, two_workers):
    for case in UPDATES[rule]:
        check(case, alone, two_workers, f"-{rule}")


@pytest.mark.cases("Refused")
def test_a_norm_of_what_a_loop_returns_is_refused(two_workers):
    _, logs = two_workers
    for log in logs.values():
        (message,) = re.findall(r'^".*"$', log, re.MULTILINE)
        message = json.loads(message)
        assert "make it a loop of Python's" in message
        assert message.count("Received: ") == 1


@pytest.mark.cases("SavedWithinAccumulation")
def test_a_file_of_one_worker_within_an_accumulation_is_told(two_workers):
    _, logs = two_workers
    for log in logs.values():
        assert log.count("is saved in the middle of gradient_accumulation_steps") == 1


@pytest.mark.cases("Noise")
def test_weights_stay_the_same_whatever_is_drawn(two_workers):
    _, logs = two_workers
    first, second = (re.findall(r"^noisy .*$", log, re.MULTILINE) for log in logs.values())
    assert first == second != []


def test_gradients_that_are_handed_on_cost_no_collective():
    counts = json.loads(in_one_process("-", "--count_collectives").splitlines()[-1])
    assert counts["as it is"] == counts["without stand-ins"] > 0
    # As compressed as they are otherwise.
    assert counts["compressed: clipped"] == counts["compressed: as it is"]
