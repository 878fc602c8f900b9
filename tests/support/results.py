"""Reads what the processes of a test have left."""

import numpy as np


def load(path, log):
    """The arrays of a file, or a failure that shows the log of who had to write it."""
    assert path.exists(), f"{path.name} is missing:\n{log[-8000:]}"
    with np.load(path) as arrays:
        return dict(arrays)


def assert_close(found, expected, tolerance):
    """Two dicts of arrays have the same names and, to a tolerance, the same values."""
    assert set(found) == set(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=tolerance, atol=tolerance, err_msg=key)


def weights_of(found, kind="weights"):
    """The arrays of a case's results that are named `KIND/0`, `KIND/1` and so on."""
    names = [name for name in found if name.startswith(f"{kind}/")]
    return [found[f"{kind}/{i}"] for i in range(len(names))]


def assert_all_close(found, expected, rtol, atol=None):
    """Two lists of arrays have the same values, to tolerances that are the same by default."""
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol if atol is None else atol)


def assert_same(found, expected):
    """Two lists of arrays have the same values."""
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, other)
