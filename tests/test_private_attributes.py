"""Private attributes of Keras and TensorFlow: each that is used is in a list, and looked for."""

import ast
import pathlib

import pytest

import keras_psplus
from keras_psplus.keras_internals import keras_attributes, private_attributes
from keras_psplus.tf_internals import attributes

ROOT = pathlib.Path(next(iter(keras_psplus.__path__)))
LISTED = {
    name
    for _, names in (*keras_attributes.ATTRIBUTES, *attributes.ATTRIBUTES)
    for name in names.split()
}
# What this library sets on objects of Keras's and TensorFlow's.
OWN = {
    "_clocks",
    "_decision",
    "_end",
    "_is_made_to_train",
    "_is_of_layer",
    "_lanes",
    "_local_part",
    "_made_by",
    "_made_in",
    "_of_rows",
    "_keras_rs_placement",
    "_row_reads",
}
# Asked for with a default, since not all objects have it.
OPTIONAL = {
    "_default_device_embedding_layers",
    "_device_iterators",
    "_distribution_strategy",
    "_gate_dense",
    "_rng",
}
PYTHON = {"_exit", "_fmt"}


def trees():
    for path in sorted(ROOT.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def defined():
    """Private names that the library gives to anything of its own."""
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    yield node.attr


def used():
    """Pairs of a private name that is asked of some object, and where."""
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                yield node.attr, f"{path.name}:{node.lineno}"
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                "getattr",
                "hasattr",
                "setattr",
            ):
                if isinstance(node.args[1], ast.Constant):
                    yield node.args[1].value, f"{path.name}:{node.lineno}"


def test_all_that_are_used_are_listed():
    known = LISTED | OWN | OPTIONAL | PYTHON | set(defined())
    unknown = {
        f"{name} in {where}"
        for name, where in used()
        if name.startswith("_") and not name.endswith("__") and name not in known
    }
    assert not unknown


def test_none_is_listed_that_is_not_used():
    names = {name for name, _ in used()}
    assert not {name for name in LISTED if name not in names}


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("tensorflow.python", {"tf_internals"}),
        ("tensorflow.core", {"tf_internals"}),
        ("tensorflow.compiler", {"tf_internals"}),
        ("keras.src", {"keras_internals"}),
    ],
)
def test_internals_are_imported_in_one_place(name, places):
    found = set()
    for path, tree in trees():
        for node in ast.walk(tree):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            if any(f"{module}.".startswith(f"{name}.") for module in modules):
                found.add(path.relative_to(ROOT).parts[0])
    assert found == places


class Other:
    def __init__(self):
        self._there = None

    def _method(self):
        pass


def test_what_is_missing_is_named():
    private_attributes.check_attributes("Other 1.0", [(Other, "_there _method")])
    message = r"does not fit Other 1.0: it relies on Other._gone. .* Received: Other 1.0"
    with pytest.raises(ImportError, match=message):
        private_attributes.check_attributes("Other 1.0", [(Other, "_there _gone")])
