"""What goes for all tests."""

import gc

# Python's garbage collector would walk through TensorFlow and Keras again and again, also while the
# tests import them. What children of this process do is not changed; see quick_start.py for that.
gc.set_threshold(50_000, 20, 20)

# Where files take minutes, of which one at the end would leave all but one processor idle.
LONG = ("multi_process", "parameter_server", "all_reduce", "examples", "fidelity")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.parent.name not in LONG)


def pytest_collection_finish():
    gc.freeze()
