"""The check at import: what is refused, and in which words. Nothing is installed or removed."""

import importlib.metadata
import pathlib
import sys
import tomllib
import types

import pytest

from keras_psplus import versions
from tests.support.tables import for_each

PYPROJECT = pathlib.Path(__file__).parent.parent / "pyproject.toml"


@pytest.fixture
def installed(monkeypatch):
    """Stands in for pip's metadata: a dict of distribution names to versions."""
    distributions = {"keras": "3.15.1", "tensorflow": "2.21.0"}

    def version(name):
        if name not in distributions:
            raise importlib.metadata.PackageNotFoundError(name)
        return distributions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.delenv(versions.SKIP_VARIABLE, raising=False)
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    return distributions


@pytest.fixture
def no_modules(monkeypatch):
    """No module can be imported, as where only metadata could tell."""

    def import_module(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(versions.importlib, "import_module", import_module)


def refusal():
    with pytest.raises(ImportError) as error:
        versions.check_versions()
    return str(error.value)


def test_this_installation_is_supported():
    versions.check_versions()


@for_each("keras", ["3.13.0", "3.14.1", "3.15.1", "3.15.0.dev20260101"])
@for_each("tensorflow", ["2.20.0", "2.21.0", "2.21.1rc0"])
def test_supported_versions_pass(installed, keras, tensorflow):
    installed.update(keras=keras, tensorflow=tensorflow)
    versions.check_versions()


NIGHTLY = {"keras-nightly": "3.17.0.dev2026", "tf-nightly": "2.22.0.dev2026"}
OTHER_NAMES = {"keras-nightly": "3.15.0.dev2026", "tensorflow-cpu": "2.20.0"}


@for_each(
    "found, words, received",
    [
        ({"keras": "3.12.4"}, ["too old"], "keras 3.12.4"),
        ({"keras": "3.0.0"}, ["too old"], "keras 3.0.0"),
        ({"keras": "2.15.0"}, ["too old"], "keras 2.15.0"),
        ({"keras": None}, ["not installed"], "no keras"),
        ({"tensorflow": None}, ["not installed"], "no tensorflow"),
        ({"tensorflow": "2.19.1"}, ["too old"], "tensorflow 2.19.1"),
        ({"tensorflow": "unknown"}, ["Cannot read this version"], "'unknown'"),
        ({"keras": "3.17.0"}, ["newer than", versions.SKIP_VARIABLE], "keras 3.17.0"),
        (
            {"tensorflow": "2.22.0rc1"},
            ["newer than", versions.SKIP_VARIABLE],
            "tensorflow 2.22.0rc1",
        ),
        (
            {"keras": None, "tensorflow": None, **OTHER_NAMES, "tensorflow-cpu": "2.16.1"},
            ["too old"],
            "tensorflow 2.16.1",
        ),
        (
            {"keras": None, "tensorflow": None, **NIGHTLY},
            ["newer than", f'`pip install "keras{versions.KERAS.specifier}"`'],
            "keras 3.17.0.dev2026",
        ),
    ],
)
def test_what_is_not_supported_is_refused(installed, no_modules, found, words, received):
    installed.clear()
    installed.update({"keras": "3.15.1", "tensorflow": "2.21.0"} | found)
    for name in [name for name, version in installed.items() if version is None]:
        del installed[name]
    message = refusal()
    assert all(word in message for word in words), message
    assert message.endswith(f"Received: {received}")


@for_each("name, found", [("keras", "3.17.0"), ("tensorflow", "2.22.0rc1")])
def test_new_versions_may_be_admitted(installed, monkeypatch, name, found):
    installed.update({"keras": "3.15.1", "tensorflow": "2.21.0", name: found})
    monkeypatch.setenv(versions.SKIP_VARIABLE, "0")
    refusal()
    monkeypatch.setenv(versions.SKIP_VARIABLE, "1")
    with pytest.warns(UserWarning, match=f"newer than .* Received: {name} {found}"):
        versions.check_versions()
    installed["keras"] = "3.12.0"  # an old one is not
    assert "too old" in refusal()


def test_other_distribution_names_are_found(installed):
    del installed["keras"], installed["tensorflow"]
    installed.update(OTHER_NAMES)
    versions.check_versions()
    installed.update(NIGHTLY)
    del installed["tensorflow-cpu"]
    problem = versions.problem(versions.TENSORFLOW)
    assert problem.endswith("Received: tensorflow 2.22.0.dev2026")


def test_a_nightly_build_above_a_release_is_found(installed, monkeypatch):
    """Both are installed, one in the other's folder, and the metadata name the release first."""
    import keras

    installed["keras-nightly"] = "3.17.0.dev2026"
    monkeypatch.setattr(keras, "__version__", "3.17.0.dev2026")
    message = refusal()
    assert "newer than" in message and "`pip uninstall -y keras keras-nightly`" in message
    assert message.endswith("Received: keras 3.17.0.dev2026")


@pytest.mark.parametrize(
    "error", [ImportError("no 'core' in keras.src"), AttributeError("no attribute 'core'")]
)
def test_what_does_not_fit_an_admitted_version_is_named(installed, monkeypatch, error):
    monkeypatch.setenv(versions.SKIP_VARIABLE, "1")
    monkeypatch.delitem(sys.modules, "keras")
    del installed["keras"]
    installed["keras-nightly"] = "3.17.0.dev2026"
    with pytest.raises(ImportError) as raised:
        with versions.naming_misfits():
            raise error
    message = str(raised.value)
    assert f"keras_psplus {versions.__version__} does not fit this Keras: {error}." in message
    assert f"It needs Keras {versions.KERAS.specifier}." in message
    assert f'`pip install "keras{versions.KERAS.specifier}"`' in message
    received = f"Received: keras 3.17.0.dev2026, {versions.SKIP_VARIABLE}=1"
    assert message.endswith(received)


def test_errors_of_supported_versions_are_left_as_they_are(installed):
    with pytest.raises(AttributeError, match="^our own$"):
        with versions.naming_misfits():
            raise AttributeError("our own")


def test_the_module_tells_where_no_distribution_does(installed, monkeypatch):
    installed.clear()
    modules = {
        "keras": types.SimpleNamespace(
            __version__="3.14.0",
            backend=types.SimpleNamespace(backend=lambda: "tensorflow"),
        ),
        "tensorflow": types.SimpleNamespace(__version__="2.3.0"),
    }
    monkeypatch.setattr(versions.importlib, "import_module", modules.__getitem__)
    assert refusal().endswith("Received: tensorflow 2.3.0")
    modules["tensorflow"].__version__ = "2.21.0"
    versions.check_versions()


def test_another_backend_is_refused(installed, monkeypatch):
    import keras

    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    message = refusal()
    assert "set KERAS_BACKEND=tensorflow before" in message
    assert message.endswith("Received: KERAS_BACKEND=jax")


def test_another_backend_is_refused_without_importing_it(installed, no_modules, monkeypatch):
    # Keras would import the backend, which may not be installed, and fail in words of its own.
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert refusal().endswith("Received: KERAS_BACKEND=torch")


@for_each("package", [versions.KERAS, versions.TENSORFLOW])
def test_pyproject_states_the_same_ranges(package):
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert f"{package.module}{package.specifier}" in project["dependencies"]
    cuda = project["optional-dependencies"]["cuda"]
    if package is versions.TENSORFLOW:
        assert cuda == [f"tensorflow[and-cuda]{package.specifier}"]
