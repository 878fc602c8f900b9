import pathlib
import sys

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"

# Scripts there import one another, as they do when they are run.
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))
