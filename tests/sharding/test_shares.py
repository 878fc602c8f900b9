"""The optimizer's state in shares: equal to one process, in files too, and of known size."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from keras_psplus.cluster.environment import python_path
from keras_psplus.cluster.testing import run_in_processes
from tests.selection import cases
from tests.sharding.shares_job import OPTIMIZERS
from tests.support.results import assert_close, load

pytestmark = pytest.mark.timeout(1500)

JOB = pathlib.Path(__file__).with_name("shares_job.py")
EMBEDDINGS = ["adamw", "momentum_clipnorm", "adagrad", "sgd"]
# `files` is `average`, of which it makes files.
CASES = [*(name for name in OPTIMIZERS if name != "average")]
CASES += [f"embedding/{name}" for name in EMBEDDINGS]
CASES += ["two_optimizers", "files"]
THREE = ["adamw", "muon", "adafactor", "embedding/adamw", "files"]
ENDED = "test_slots_can_be_read_when_other_workers_have_ended"
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shares")


def compared(request, *tests):
    """Cases that the tests compare with one process: all of the module's, or those of some."""
    return [name for name in cases(request, *tests) if name not in ("bytes", "ended", "units")]


def of_two(request, *others):
    """Cases of two workers: "files" for others to read, and last the one that others end before."""
    found = [*cases(request, "test_two_workers_equal_one_process", *others), "files"]
    return sorted(dict.fromkeys(found), key="ended".__eq__)


@pytest.fixture(scope="module")
def alone(request, folder):
    """What one process leaves, in a folder."""
    return train_alone(folder / "alone", [*compared(request), "resumed"])


def train_alone(path, names, job=JOB, **env):
    path.mkdir()
    env = {**os.environ, **env, "PYTHONPATH": python_path(os.environ)}
    command = [sys.executable, str(job), str(path), ",".join(names)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert not done.returncode, done.stderr[-4000:]
    return path


def train_in_cluster(path, workers, cases, job=JOB, **kwargs):
    path.mkdir(exist_ok=True)
    args = [path, ",".join(cases)]
    return path, run_in_processes(job, workers=workers, timeout=600, args=args, **kwargs)


@pytest.fixture(scope="module")
def two(request, folder):
    tests = "test_state_and_bytes", "test_table", ENDED
    return train_in_cluster(folder / "two", 2, of_two(request, *tests))


@pytest.fixture(scope="module")
def three(request, folder, two):
    env = {"LOADED": str(two[0] / "all.worker-0.keras")}
    names = [*cases(request, "test_three_workers_equal_one_process"), "load"]
    return train_in_cluster(folder / "three", 3, names, env=env)


def check(alone, cluster, case, tolerance=TOLERANCE):
    path, result = cluster
    name = case.replace("/", "_")
    expected = load(alone / f"{name}.one.npz", "")
    for task, log in result.logs.items():
        assert_close(load(path / f"{name}.{task}.npz", log), expected, tolerance)


@pytest.mark.parametrize("case", CASES)
def test_two_workers_equal_one_process(alone, two, case):
    check(alone, two, case)


@pytest.mark.parametrize("case", THREE)
def test_three_workers_equal_one_process(alone, three, case):
    check(alone, three, case)


@pytest.mark.cases("bytes")
def test_state_and_bytes(two):
    path, result = two
    found = load(path / "bytes.worker-1.npz", result.logs["worker-1"])
    np.testing.assert_array_equal(found["kept"], -(-found["whole"] // 2))
    # Momentum and velocity are as many numbers each as the gradients, of which an all-reduce of
    # two workers sends as many bytes as they have.
    all_reduced = 4 * found["whole"].sum() / 2
    assert all_reduced <= found["wire"] <= 1.1 * all_reduced
    # Without slots, rows are sent as under all-reduce, and no half of 1000 rows of 3 numbers.
    assert 0 < found["of_table"] < 4 * 1000 * 3 / 2 / 2


@pytest.mark.cases("momentum_clipnorm", "muon", "counting")
def test_table(two):
    log = two[1].logs["worker-0"]
    assert "in shares: the slots of 6 variables are cut into equal parts" in log
    assert "lie whole on one worker each (its update is not known to be element-wise)" in log
    assert "nothing is cut (variable 'counting_sgd/count' is of no one variable" in log


@pytest.mark.cases("ended", "adamw")
def test_slots_can_be_read_when_other_workers_have_ended(two):
    path, result = two
    found = load(path / "ended.worker-0.npz", result.logs["worker-0"])
    expected = load(path / "adamw.worker-0.npz", "")
    assert found
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name.replace("ended", "slots")])


@pytest.mark.cases("files")
def test_files_go_on_elsewhere(folder, alone, two, three):
    expected = load(alone / "files.one.npz", "")
    slots = {k.replace("slots", "read"): v for k, v in expected.items() if k.startswith("slots")}
    later = {k: v for k, v in expected.items() if k.startswith("later")}
    env = {"LOADED": str(two[0] / "all.worker-1.keras")}
    one = load(train_alone(folder / "loaded", ["load"], **env) / "load.one.npz", "")
    assert_close(one, slots | later, TOLERANCE)
    for task, log in three[1].logs.items():
        assert_close(load(three[0] / f"load.{task}.npz", log), slots | later, TOLERANCE)


@pytest.fixture(scope="module")
def lost(folder):
    return lose_a_worker(folder / "lost", 3)


def lose_a_worker(path, workers, job=JOB, **env):
    """Has the last worker killed in the third epoch; returns the folder with the backup."""
    victim = f"worker-{workers - 1}"
    options = {"expect_failure": True, "failure_grace": 60, "env": {**env, "VICTIM": victim}}
    _, result = train_in_cluster(path, workers, ["dying"], job, **options)
    for task, log in result.logs.items():
        if task == victim:
            assert result.exit_codes[task] == -signal.SIGKILL
        else:
            assert f"PeerLostError: {victim} (127.0.0.1:" in log, log[-3000:]
    return path


@pytest.mark.parametrize("workers", [2, 3])
def test_job_goes_on_from_its_backup_when_a_worker_is_lost(folder, alone, lost, workers):
    path = shutil.copytree(lost, folder / f"resumed by {workers}")
    check_resumed(alone, train_in_cluster(path, workers, ["resumed"]), TOLERANCE)


def check_resumed(alone, cluster, tolerance, epoch=2):
    """Equal to a run without a loss, of which the first epochs were not trained again."""
    check(alone, cluster, "resumed", tolerance)
    for log in cluster[1].logs.values():
        begun = re.findall(r"^epoch (\d) begins", log, re.MULTILINE)
        assert begun[0] == str(epoch), log[-3000:]
