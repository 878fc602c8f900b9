"""The comparison with the lab's tables lies with the benchmarks."""

import pathlib
import sys

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"

if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))
