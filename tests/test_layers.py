"""Imports run downwards: each package imports only what is below it."""

import ast
import pathlib

import pytest

import keras_psplus

ROOT = pathlib.Path(next(iter(keras_psplus.__path__)))
# From the bottom to the top.
LAYERS = [
    {"log"},
    {
        "arguments",
        "errors",
        "files",
        "private_attributes",
        "specs",
        "text_table",
        "tracebacks",
    },
    {"tf_internals", "keras_parts", "communication", "entries", "planning", "versions"},
    {"engine", "keras_attributes"},
    {"cluster", "native"},
    {"callbacks", "chaos", "compression", "datasets", "sidecar_evaluator", "updates"},
    {"core"},
    {"all_reduce", "parameter_server", "pipeline"},
    {"hybrid"},
    {"catalogue", "keras_hooks"},
    {"automatic"},
    {"cli"},
]
# The package itself, whose import installs the hooks, and what runs the command line.
TOP = {"__init__", "__main__"}


def imported(path):
    """The packages and modules of the library that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module == "keras_psplus":
            names = [f"keras_psplus.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (n.split(".")[1] for n in names if n.startswith("keras_psplus."))


def files():
    for path in sorted(ROOT.rglob("*.py")):
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if package not in TOP and package != "strategies":
            yield package, path


def test_every_package_has_a_layer():
    known = set().union(*LAYERS)
    assert {package for package, _ in files()} == known


@pytest.mark.parametrize("layer", range(len(LAYERS)), ids=[min(names) for names in LAYERS])
def test_imports_run_downwards(layer):
    below = set().union(*LAYERS[:layer])
    for package, path in files():
        if package in LAYERS[layer]:
            others = {name for name in imported(path) if name != package and name in known()}
            assert others <= below, f"{path} imports {sorted(others - below)}"


def known():
    return set().union(*LAYERS)
