"""Trains models in compiled stages on real workers; the chief writes what they come to.

compiled_job.py FOLDER NAMES
"""

import pathlib
import sys

from tests import quick_start  # noqa: F401

# isort: split
import numpy as np

import keras_psplus as psp
from tests.pipeline import test_training


def main():
    folder, names = pathlib.Path(sys.argv[1]), sys.argv[2].split(",")
    strategy = psp.PipelineStrategy(microbatches=3, schedule="1f1b", startup_timeout=60)
    for name in names:
        make = getattr(test_training, name)
        model, history, predicted = test_training.train(strategy, make, jit_compile=True)
        weights = {f"weight_{i}": one for i, one in enumerate(model.get_weights())}
        np.savez(folder / f"{name}.npz", predicted=predicted, **history, **weights)
        print(f"done {name}", flush=True)


if __name__ == "__main__":
    main()
