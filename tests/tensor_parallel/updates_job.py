"""Updates accumulated on a mesh of two rows of two workers: `updates_job.py FOLDER CASE ...`."""

from tests import quick_start  # noqa: F401

# isort: split
import pathlib
import sys

import numpy as np

import keras_psplus as psp
from keras_psplus.all_reduce.step.updating import MirroredUpdates
from tests.all_reduce.updates_job import accumulated


def main():
    folder, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
    mesh = psp.DeviceMesh((2, 2), ("batch", "model"))
    strategy = psp.ModelParallelStrategy(layout_map="auto", mesh=mesh, updates="accumulate:2")

    def make(policy):
        strategy._updates = policy
        strategy.extended.updating = MirroredUpdates(policy, strategy)
        return strategy

    for name in names:
        out = {}
        accumulated(make, out, [name])
        ((_, of),) = out.items()
        np.savez(folder / f"{name}.{strategy.task.name}.npz", *of["weights"])


if __name__ == "__main__":
    main()
