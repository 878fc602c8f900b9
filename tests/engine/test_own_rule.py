"""An update rule and a compressor that the library does not have, in one file of a user's own."""

import json
import pathlib
import re

import numpy as np
import pytest

from keras_psplus.cluster.testing import run_in_processes

FILE = pathlib.Path(__file__).with_name("own_rule.py")


def by_hand():
    """Plain descent on the first, third and fifth batch, at twice the rate."""
    weights, x = np.array([[1.0], [2.0]]), np.arange(24).reshape(6, 2, 2) / 24
    for batch in x[::2]:
        weights = weights - 0.2 * 2 / 2 * batch.T @ (batch @ weights - 1)
    return weights.ravel()


@pytest.mark.parametrize(
    ("kind", "cluster"),
    [
        ("all_reduce", {"workers": 2}),
        # One worker has all batches in their order.
        ("parameter_server", {"workers": 1, "ps": 1, "chief": True}),
    ],
)
def test_engines_call_it(kind, cluster):
    logs = run_in_processes(FILE, **cluster, args=[kind], timeout=120).logs
    found = [w for log in logs.values() for w in re.findall(r"^weights (.*)$", log, re.MULTILINE)]
    assert len(found) == (cluster["workers"] if kind == "all_reduce" else 1)
    for weights in found:
        assert json.loads(weights) == pytest.approx(by_hand(), abs=1e-6)
