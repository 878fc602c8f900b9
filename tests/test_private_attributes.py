"""Private attributes of Keras and TensorFlow: each that is used is in a list, and looked for.

What is replaced in Keras is what Keras itself uses, whatever else lies in its folder.
"""

import ast
import functools
import inspect

import keras

from keras_psplus.keras_internals import keras_parts
from tests import private_attributes, structure
from tests.support.tables import for_each

LISTED = [
    (owner, name)
    for owner, names in (*private_attributes.KERAS, *private_attributes.TENSORFLOW)
    for name in names.split()
]
NAMES = {name for _, name in LISTED}
# What this library sets on objects of Keras's and TensorFlow's.
OWN = set(
    "_clocks _decision _end _is_made_to_train _is_of_layer _keras_rs_placement _lanes _local_part"
    " _made_by _made_in _of_rows _row_reads".split()
)
# Asked for with a default, since not all objects have it.
OPTIONAL = set(
    "_default_device_embedding_layers _device_iterators _distribution_strategy _gate_dense"
    " _rng".split()
)
PYTHON = {"_exit", "_fmt"}


@functools.cache
def nodes():
    """Pairs of a path and a node of its tree."""
    return [(path, node) for path, tree in structure.trees().items() for node in ast.walk(tree)]


def defined():
    """Private names that the library gives to anything of its own."""
    for _, node in nodes():
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr


def used():
    """Pairs of a private name that is asked of some object, and where."""
    for path, node in nodes():
        if isinstance(node, ast.Attribute):
            yield node.attr, f"{path.name}:{node.lineno}"
        elif isinstance(node, ast.Call):
            function = getattr(node.func, "id", "")
            if function in ("getattr", "hasattr", "setattr"):
                if isinstance(node.args[1], ast.Constant):
                    yield node.args[1].value, f"{path.name}:{node.lineno}"


def test_all_that_are_used_are_listed():
    known = NAMES | OWN | OPTIONAL | PYTHON | set(defined())
    unknown = {
        f"{name} in {where}"
        for name, where in used()
        if name.startswith("_") and not name.endswith("__") and name not in known
    }
    assert not unknown


def test_none_is_listed_that_is_not_used():
    names = {name for name, _ in used()}
    assert not {name for name in NAMES if name not in names}


@for_each(
    "name, place",
    [
        ("tensorflow.python", "tf_internals"),
        ("tensorflow.core", "tf_internals"),
        ("tensorflow.compiler", "tf_internals"),
        ("keras.src", "keras_internals"),
    ],
)
def test_internals_are_imported_in_one_place(name, place):
    found = set()
    for path, node in nodes():
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        if any(f"{module}.".startswith(f"{name}.") for module in modules):
            found.add(path.relative_to(structure.ROOT / structure.PACKAGE).parts[0])
    assert found == {place}


def test_all_that_are_listed_are_there():
    missing = [(owner, name) for owner, name in LISTED if not private_attributes.has(owner, name)]
    assert not missing
    assert not private_attributes.has(keras.Model, "_gone")


@for_each(
    "user, part",
    [
        (keras.Model, keras_parts.BaseTrainer),
        (keras.Model, keras_parts.TensorFlowTrainer),
        (keras.Variable, keras_parts.Variable),
    ],
)
def test_classes_are_those_that_keras_has_made_its_own_of(user, part):
    assert issubclass(user, part)
    assert part.__module__.startswith("keras.src.")


def test_the_functions_of_arrays_are_those_that_layers_call():
    found = inspect.getclosurevars(keras.ops.take).globals["backend"]
    assert getattr(found, "ops", found).numpy is keras_parts.numpy_module
