"""Runs examples one after the other, as `python examples/NAME.py` would, under one strategy.

recognised_job.py NAME ARGUMENT ... -- NAME ARGUMENT ...
"""

import functools
import itertools
import pathlib
import runpy
import sys

import keras

import keras_psplus as psp

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def main(words):
    # A process joins its cluster once.
    psp.strategy_from_env = functools.cache(psp.strategy_from_env)
    for is_end, part in itertools.groupby(words, "--".__eq__):
        if not is_end:
            name, *arguments = part
            keras.backend.clear_session()
            path = str(EXAMPLES / f"{name}.py")
            sys.argv[:] = [path, *arguments]
            runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
