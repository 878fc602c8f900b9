"""What goes for all tests."""

import gc
import os
import pathlib

# Python's garbage collector would walk through TensorFlow and Keras again and again, also while the
# tests import them. What children of this process do is not changed; see quick_start.py for that.
gc.set_threshold(50_000, 20, 20)

# Scripts that tests start import what they have in common from this folder.
_ROOT = str(pathlib.Path(__file__).resolve().parents[1])
if _ROOT not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    inherited = [path for path in [os.environ.get("PYTHONPATH")] if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([_ROOT, *inherited])

# Where files take minutes, of which one at the end would leave all but one processor idle.
LONG = (
    "multi_process",
    "parameter_server",
    "hybrid",
    "all_reduce",
    "examples",
    "fidelity",
    "faults",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.parent.name not in LONG)


def pytest_collection_finish():
    gc.freeze()
