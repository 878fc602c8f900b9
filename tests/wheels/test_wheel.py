"""The wheel, built from the source distribution, does its work away from the checkout."""

import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

from keras_psplus import versions

pytestmark = pytest.mark.processes
ROOT = pathlib.Path(__file__).resolve().parents[2]
# What a build reads; the rest of a checkout may be large.
READS = ("keras_psplus", "pyproject.toml", "README.md")
SCRIPT = """
import pathlib, sys
import keras_psplus as psp
folder = pathlib.Path(psp.__file__).parent
assert folder.is_relative_to(sys.argv[1]), folder
import keras, numpy as np
strategy = psp.strategy_from_env()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((32, 4)), np.ones((32, 1)), batch_size=16, verbose=0)
print(psp.__version__, type(strategy).__name__, strategy.num_workers)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with a source distribution and a wheel, as `python -m build` makes them."""
    source = tmp_path_factory.mktemp("source")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*READS, "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return source / "dist"


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A folder into which pip has installed the wheel, without what it depends on."""
    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(folder), str(wheel)], check=True)
    return folder


def run(installed, folder, *command):
    """Runs Python in a folder that is not the checkout, with the installed wheel."""
    env = {name: value for name, value in os.environ.items() if "TF_CONFIG" not in name}
    env |= {"PYTHONPATH": str(installed), "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.extended
def test_both_hold_what_is_needed(built):
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.name.startswith(f"keras_psplus-{versions.__version__}-py3-none-any")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "keras_psplus").rglob("*.py")}
    native = {f"keras_psplus/native/{path.name}" for path in ROOT.glob("keras_psplus/native/*.cc")}
    assert native
    assert modules | native | {"keras_psplus/py.typed"} <= names
    assert not [name for name in names if name.startswith("tests/")]
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "keras_psplus/catalogue.py"} <= held


def test_the_version_is_in_one_place(built):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    assert f"\nVersion: {versions.__version__}\n" in metadata


@pytest.mark.extended
def test_two_workers_train_with_the_installed_wheel(installed, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = ("-m", "keras_psplus", "run", "--workers", "2", "train.py", str(installed))
    printed = run(installed, tmp_path, *launcher)
    for task in ("worker-0", "worker-1"):
        assert f"[{task}] {versions.__version__} MultiWorkerMirroredStrategy 2" in printed


@pytest.mark.extended
def test_commands_work_without_a_checkout(installed, tmp_path):
    assert "all_reduce_int8" in run(installed, tmp_path, "-m", "keras_psplus", "run", "--list")
    export = ("export", "kubernetes", "--workers", "2", "--image", "example/train:1", "train.py")
    assert "kind: Job" in run(installed, tmp_path, "-m", "keras_psplus", *export)
