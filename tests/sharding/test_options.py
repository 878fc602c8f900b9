"""Shares with other arguments: accumulated gradients, compressors and groups."""

import itertools
import json
import pathlib

import numpy as np
import pytest

from tests.selection import cases
from tests.sharding.options_job import ACCUMULATED
from tests.sharding.test_shares import check, train_alone, train_in_cluster
from tests.support.results import load

pytestmark = pytest.mark.timeout(1500)

JOB = pathlib.Path(__file__).with_name("options_job.py")
GROUPED = ["muon", "embedding/adamw"]
CASES = [f"accumulated/{name}" for name in ACCUMULATED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("options")


@pytest.fixture(scope="module")
def alone(request, folder):
    return train_alone(folder / "alone", [*cases(request), *GROUPED, "digits"], JOB)


@pytest.fixture(scope="module", params=["optimizer", "all"])
def accumulating(request, folder):
    options = json.dumps({"shard": request.param, "updates": "accumulate"})
    names = cases(request, accumulating=request.param)
    return train_in_cluster(folder / request.param, 2, names, JOB, env={"OPTIONS": options})


@pytest.mark.parametrize("case", CASES)
def test_accumulated_updates_equal_those_of_one_process(alone, accumulating, case):
    check(alone, accumulating, case, 2e-5)


@pytest.mark.parametrize("shard", ["optimizer", "all"])
def test_compressed_training_learns_as_much(folder, alone, shard):
    options = {"shard": shard, "compression": {"gradients": "int8", "weights": "bf16"}}
    # So that layers are gathered one by one.
    options["bucket_bytes"] = 1 << 14
    env = {"OPTIONS": json.dumps(options)}
    path, result = train_in_cluster(folder / f"{shard} digits", 2, ["digits"], JOB, env=env)
    first, second = (load(path / f"digits.{task}.npz", log) for task, log in result.logs.items())
    exact = load(alone / "digits.one.npz", "")
    assert exact["accuracy"] > 0.95
    assert first["accuracy"] > exact["accuracy"] - 0.015
    for name, value in first.items():
        # Bit by bit, also on the worker whose part it is.
        np.testing.assert_array_equal(second[name], value, err_msg=name)
    assert not np.array_equal(first["weights/0"], exact["weights/0"])
    # Halves for the other worker: kernels in bytes with scales, biases whole; two bytes of weights.
    kernels, biases = 64 * 96 + 96 * 10, 96 + 10
    sent = (kernels * (1 + 4 / 256) + 4 * biases) / 2
    # Backward needs the first kernel again, and the second is still there.
    gathered = kernels + biases + (64 * 96 if shard == "all" else 0)
    assert first["wire"] == pytest.approx(sent + gathered, rel=0.01)


def check_groups(folder, alone, sharing, **options):
    """Trains on four workers, of which so many share; returns the last one's bytes."""
    path = folder / " ".join(map(str, options.values()))
    env = {"OPTIONS": json.dumps(options)}
    run = train_in_cluster(path, 4, [*GROUPED, "bytes"], JOB, env=env)
    for case in GROUPED:
        check(alone, run, case, 2e-5)
    found = load(path / "bytes.worker-3.npz", run[1].logs["worker-3"])
    np.testing.assert_array_equal(found["kept"], -(-found["whole"] // sharing))
    return found


@pytest.mark.parametrize("shard", ["optimizer", "all"])
def test_groups_of_two_of_four_workers_equal_one_process(folder, alone, shard):
    found = check_groups(folder, alone, 2, shard=shard, shard_group=2)
    if shard == "optimizer":
        # Momentum and velocity are as many numbers each as the gradients, of which a worker sends
        # half to the other of its group, its own half to the other group, and half of new values.
        sent = 4 * 3 / 2 * found["whole"].sum() / 2
        assert sent <= found["wire"] <= 1.1 * sent


@pytest.mark.parametrize(
    "shard, groups",
    [
        ("optimizer", [[3, 0], [2, 1]]),
        ("optimizer", [[0, 1], [2, 3]]),
        ("all", [[0, 1], [2, 3]]),
        ("all", [[0, 3], [1, 2]]),
    ],
)
def test_parts_along_a_topology_equal_one_process(folder, alone, shard, groups):
    found = check_groups(folder, alone, 4, shard=shard, topology=groups)
    if shard == "optimizer":
        # Of as many bytes as those of an all-reduce, a third goes between groups.
        sent = 4 * 3 / 2 * found["whole"].sum() / 2
        assert sent <= found["wire"] <= 1.2 * sent
        assert found["between"] == pytest.approx(found["wire"] / 3)


@pytest.mark.parametrize("groups", [{"shard_group": 2}, {"topology": [[0, 1], [2, 3]]}])
def test_what_goes_between_groups_is_compressed(folder, alone, groups):
    compression = {"gradients": "int8", "weights": "bf16"}
    options = json.dumps({"shard": "optimizer", "compression": compression, **groups})
    path = folder / f"{[*groups][0]} digits"
    run = train_in_cluster(path, 4, ["digits"], JOB, env={"OPTIONS": options})
    first, *others = (load(run[0] / f"digits.{task}.npz", log) for task, log in run[1].logs.items())
    exact = load(alone / "digits.one.npz", "")
    assert first["accuracy"] > exact["accuracy"] - 0.015
    for other, (name, value) in itertools.product(others, first.items()):
        np.testing.assert_array_equal(other[name], value, err_msg=name)
    kernels, biases = 64 * 96 + 96 * 10, 96 + 10
    encoded = kernels * (1 + 4 / 256) + 4 * biases
    if "topology" in groups:
        # Floats inside, twice; a quarter of gradients and of new values between groups.
        expected = 4 * (kernels + biases) + encoded / 4 + 2 * (kernels + biases) / 4
    else:
        # Floats inside; halves of halves between groups, twice; bf16 of new values inside.
        expected = 4 * (kernels + biases) / 2 + encoded / 2 + 2 * (kernels + biases) / 2
    assert first["wire"] == pytest.approx(expected, rel=0.03)
