"""Checks of training in shares that are the same for the optimizer's state and for weights."""

import numpy as np
import pytest

from tests.sharding import cases
from tests.support.cluster import equals_one_process, reference, run
from tests.support.results import assert_close


def check_files(layout, folder, other, **args):
    """Training equals one process while files are written; another layout goes on from one."""
    expected = reference(cases.files, **args)
    found = run(layout, cases.files, folder=str(folder), **args)
    assert_close(found.first, expected, 2e-5)
    read = run(other, cases.loaded, path=str(folder / "all.worker-1.keras"))
    wanted = {k: v for k, v in expected.items() if k.startswith(("slots", "later"))}
    assert_close(read.first, wanted, 2e-5)


def check_compressed(layout, sent):
    """Compressed training learns as much, and sends as many bytes.

    Args:
        layout: The workers.
        sent: Function of the weights' numbers, and of bytes of the encoded gradients, that returns
            the bytes that a step sends.
    """
    exact = reference(cases.digits)
    assert exact["accuracy"] > 0.9
    compression = {"gradients": "int8", "weights": "bf16"}
    # So that layers are gathered one by one.
    found = run(layout, cases.digits, compression=compression, bucket_bytes=1 << 14).first
    assert found["accuracy"] > exact["accuracy"] - 0.015
    assert not np.array_equal(found["weights/0"], exact["weights/0"])
    # Kernels are bytes with scales, biases are floats.
    kernels, biases = 64 * 96 + 96 * 10, 96 + 10
    encoded = kernels * (1 + 4 / 256) + 4 * biases
    assert found["wire"] == pytest.approx(sent(kernels + biases, encoded), rel=0.03)


def check_parts(layout, sharing, name="adam", said=""):
    """Workers, of which so many share, equal one process; returns the last one's sizes and bytes.

    They keep equal parts of the optimizer's state.
    """
    results = run(layout, cases.state_and_bytes, name=name)
    expected = reference(cases.state_and_bytes, name=name)
    assert_close({what: results.first[what] for what in expected}, expected, 2e-5)
    assert said in results.logs["worker-0"]
    *_, last = results.values()
    found = {what.removeprefix("own "): value for what, value in last.items()}
    np.testing.assert_array_equal(found["kept"], -(-found["whole"] // sharing))
    return found


def check_groups(layout, name, sharing):
    """The same, and of another model."""
    equals_one_process(layout, cases.trained, name=name)
    return check_parts(layout, sharing)
