"""What goes for all tests."""

# Where files take minutes, of which one at the end would leave all but one processor idle.
LONG = ("multi_process", "parameter_server", "all_reduce", "examples", "fidelity")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.parent.name not in LONG)
