import os
import pathlib

import pytest


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """The scripts' environment: no cluster, and not this directory."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    root = str(pathlib.Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.chdir(tmp_path)
