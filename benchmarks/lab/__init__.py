"""Benchmark lab: emulated hosts, their work, and evaluation of the figures."""

import pathlib
import sys

# The hosts are those of the tests, which are not installed.
_ROOT = str(pathlib.Path(__file__).parents[2])
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)
