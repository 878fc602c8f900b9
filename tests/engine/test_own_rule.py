"""An update rule and a compressor that the library does not have, in one file of a user's own."""

import json
import pathlib
import re

import numpy as np
import pytest

from tests.support.jobs import run_in_processes
from tests.support.tiers import extended

pytestmark = pytest.mark.processes

FILE = pathlib.Path(__file__).with_name("own_rule.py")


def by_hand():
    """Plain descent on the first, third and fifth batch, at twice the rate."""
    weights, x = np.array([[1.0], [2.0]]), np.arange(24).reshape(6, 2, 2) / 24
    for batch in x[::2]:
        weights = weights - 0.2 * 2 / 2 * batch.T @ (batch @ weights - 1)
    return weights.ravel()


def rows_by_hand():
    rows = np.array([2.0, 3.0, 4.0])
    for batch in (np.arange(12) % 3).reshape(6, 2)[::2]:
        rows[batch] -= 0.2 * 2 / 2 * (rows[batch] - 1)
    return rows


@pytest.mark.parametrize(
    ("kind", "cluster"),
    [
        ("all_reduce", {"workers": 2}),
        # One worker has all batches in their order.
        *extended(("parameter_server", {"workers": 1, "ps": 1, "chief": True})),
    ],
)
def test_engines_call_it(kind, cluster):
    logs = run_in_processes(FILE, kind, **cluster, timeout=560).logs
    for name, expected in (("weights", by_hand()), ("rows", rows_by_hand())):
        pattern = re.compile(rf"^{name} (.*)$", re.MULTILINE)
        found = [weights for log in logs.values() for weights in pattern.findall(log)]
        assert len(found) == (cluster["workers"] if kind == "all_reduce" else 1)
        for weights in found:
            assert json.loads(weights) == pytest.approx(expected, abs=1e-6)
