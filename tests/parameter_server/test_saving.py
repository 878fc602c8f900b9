"""A model's files mean the same with parameter servers and without."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

JOB = pathlib.Path(__file__).with_name("saving_job.py")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
FILES = ["keras", "weights", "checkpoint"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the job has left its files."""
    folder = tmp_path_factory.mktemp("saving")
    path = os.pathsep.join([str(JOB.parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    environment.pop("TF_CONFIG", None)
    process = subprocess.run(
        [sys.executable, JOB, folder], env=environment, capture_output=True, text=True, timeout=150
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return folder


@pytest.fixture(params=["whole", "sharded"])
def kind(request):
    """How variables lay on the parameter servers."""
    return request.param


def read(folder, name):
    with np.load(folder / f"{name}.npz") as arrays:
        return dict(arrays)


def assert_same(found, expected, atol=0.0):
    assert sorted(found) == sorted(expected)
    for key in expected:
        # Predictions are computed in batches of another size, maybe.
        tolerance = max(atol, 1e-6) if key == "predictions" else atol
        np.testing.assert_allclose(found[key], expected[key], rtol=0, atol=tolerance, err_msg=key)


@pytest.mark.parametrize("name", FILES)
def test_parameter_servers_load_what_one_process_saved(name, folder, kind):
    assert_same(read(folder, f"{kind}.loaded_{name}"), read(folder, "alone.trained"))


def test_training_goes_on_as_in_one_process(folder, kind):
    expected = read(folder, "alone.continued")
    assert_same(read(folder, f"{kind}.continued"), expected, atol=1e-5)
    before = read(folder, "alone.trained")
    assert not np.allclose(expected["predictions"], before["predictions"], atol=1e-3)


def test_weights_are_loaded_over_others(folder, kind):
    assert_same(read(folder, f"{kind}.loaded_again"), read(folder, "alone.trained"))


def test_one_process_loads_what_parameter_servers_saved(folder, kind):
    from . import saving_job

    # The job's last two attempts to save failed: the files are those from before.
    assert not [path for path in (folder / kind).iterdir() if path.name.startswith(".")]
    expected = read(folder, f"{kind}.trained")
    for model in saving_job.loaded(folder / kind).values():
        assert_same(saving_job.state(model), expected)


def test_an_export_predicts_the_same_without_parameter_servers(folder, kind):
    import tensorflow as tf

    from . import saving_job

    exported = tf.saved_model.load(str(folder / kind / "export"))
    predictions = exported.serve(saving_job.x).numpy()
    expected = read(folder, f"{kind}.trained")["predictions"]
    np.testing.assert_allclose(predictions, expected, rtol=0, atol=1e-6)
