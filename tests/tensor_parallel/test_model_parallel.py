"""Weights cut along a mesh: equal to one process, in files too, and of known size."""

import re

import numpy as np
import pytest

from tests.selection import cases
from tests.sharding.test_shares import check, train_alone, train_in_cluster
from tests.support.results import assert_close, load
from tests.tensor_parallel import cut_job

pytestmark = pytest.mark.timeout(1500)

JOB = cut_job.__file__
TOLERANCE = 2e-5
# Where losses do not depend on keys' biases, Adam would move these by rounding errors.
CASES = ["mlp/adamw", "mixed", "own_step", "grouped/sgd", "gpt2/sgd", "mlp/accumulate"]
CASES += ["vocabulary", "odd/sgd", "table/lamb", "mlp/lamb_accumulate"]
SQUARE = ["mlp/adamw", "own_step", "mlp/accumulate", "vocabulary"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cut")


@pytest.fixture(scope="module")
def alone(request, folder):
    return train_alone(folder / "alone", cases(request), JOB)


@pytest.fixture(scope="module")
def two(request, folder):
    env = {"WORKERS": "2"}
    names = [*cases(request, "test_two_workers_equal_one_process", "test_table")]
    names += ["files", "parts", "logits"]
    return train_in_cluster(folder / "two", 2, [*dict.fromkeys(names)], JOB, env=env)


@pytest.fixture(scope="module")
def square(request, folder, two):
    env = {"WORKERS": "4", "LOADED": str(two[0] / "all.worker-1.keras")}
    names = [*cases(request, "test_rows_divide_batches"), "load"]
    return train_in_cluster(folder / "square", 4, names, JOB, env=env)


@pytest.mark.parametrize("case", [*CASES, "files"])
def test_two_workers_equal_one_process(alone, two, case):
    check(alone, two, case, TOLERANCE)


@pytest.mark.parametrize("case", SQUARE)
def test_rows_divide_batches(alone, square, case):
    check(alone, square, case, TOLERANCE)


@pytest.mark.cases("mlp/adamw")
def test_groups_of_rows_equal_one_process(folder, alone):
    env = {"WORKERS": "6", "TOPOLOGY": "[[0, 1, 2, 3], [4, 5]]"}
    found = train_in_cluster(folder / "groups", 6, ["mlp/adamw"], JOB, env=env)
    check(alone, found, "mlp/adamw", TOLERANCE)


@pytest.mark.cases("grouped/sgd", "gpt2/sgd")
def test_what_does_not_talk_to_other_workers_is_compiled(folder, alone):
    env, names = {"WORKERS": "2", "COMPILES": "1"}, ["grouped/sgd", "gpt2/sgd", "own_step"]
    found = train_in_cluster(folder / "compiled", 2, names, JOB, env=env)
    for case in names[:2]:
        check(alone, found, case, TOLERANCE)
    for log in found[1].logs.values():
        compiled = {
            name for line in re.findall("^compiled: (.*)", log, re.M) for name in line.split()
        }
        assert {"attention", "self_attention", "layer_norm"} <= compiled
        assert "none that XLA can compile: layers with weights in parts: they talk to other" in log


def test_each_worker_has_its_part(two):
    path, result = two
    for task, log in result.logs.items():
        found = load(path / f"parts.{task}.npz", log)
        np.testing.assert_array_equal(2 * found["kept"], found["whole"])
        assert found["slots"] == 2  # momentum and velocity
        # Gathered are positions, cut by width, three numbers of each row for the loss, and two for
        # its accuracy. Forward, a table and two layers of each block are summed; backward, the
        # gradients of what two cut layers of each multiply, and those of the head.
        assert sorted(found["gathered"].tolist()) == ["[2]", "[3]", "[6, 4]"]
        assert found["summed"] == 1 + 2 * 2 + 2 * 2 + 1


def test_logits_are_not_gathered(two):
    path, result = two
    # Three numbers of each row for a loss, two for its accuracy; outputs of the hidden layer, and
    # the logits of which one metric needs all.
    wholes, small = ["[6, 4]", "[4]"], ["[6, 3]", "[6, 2]", *3 * ["[3]", "[2]"]]
    for task, log in result.logs.items():
        found = load(path / f"logits.{task}.npz", log)["gathered"].tolist()
        assert sorted(found) == sorted(2 * [*small, *wholes])
        lines = re.findall(r"logits of shape \(\w+, 8\) are gathered in each step, as '", log)
        assert len(lines) == (task == "worker-0")


@pytest.mark.cases("mlp/adamw", "table/lamb")
def test_table(two):
    log = two[1].logs["worker-0"]
    assert "over 1 x 2 workers: 7 of 11 variables are cut" in log
    assert "matched by no weight: " in log
    assert "'adam_w' keeps the slots of 7 cut weights in parts" in log
    assert "'lamb' gathers 5 cut weights and their gradients for each update" in log


@pytest.mark.cases("files")
def test_files_go_on_elsewhere(alone, square):
    expected = by_layer(load(alone / "files.one.npz", ""))
    for task, log in square[1].logs.items():
        found = by_layer(load(square[0] / f"load.{task}.npz", log))
        assert_close(found, expected, TOLERANCE)


def by_layer(arrays):
    """Arrays without the model's name, which paths of a loaded one do not have."""
    return {re.sub("sequential[/_]", "", name): value for name, value in arrays.items()}
