import pathlib

import pytest

import keras_psplus


@pytest.fixture(autouse=True)
def subprocesses_import_the_same_package(monkeypatch):
    """Installed or not: what these tests start imports the keras_psplus that they import."""
    root = pathlib.Path(next(iter(keras_psplus.__path__))).parent
    monkeypatch.setenv("PYTHONPATH", str(root))
