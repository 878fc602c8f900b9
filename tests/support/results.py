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
