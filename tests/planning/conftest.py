"""The comparison with the lab's tables lies with the benchmarks."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))
