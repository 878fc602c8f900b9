"""Public functions have types, for readers and for mypy (`make lint`)."""

import ast
import pathlib

import keras_psplus
from tests.support.tables import for_each

ROOT = pathlib.Path(next(iter(keras_psplus.__path__)))
FILES = sorted(ROOT.rglob("*.py"))


def public_functions(tree):
    """The functions of a module, and the methods of its classes, whose names are public."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node)
        elif isinstance(node, ast.FunctionDef):
            if node.name == "__init__" or not node.name.startswith("_"):
                yield node


def untyped(function):
    """Names of a function's arguments, and `return`, that have no annotation."""
    args = function.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    names = [a.arg for a in every if a is not None and a.annotation is None]
    names = [name for name in names if name not in ("self", "cls")]
    return names + (["return"] if function.returns is None else [])


@for_each("path", FILES)
def test_public_functions_have_types(path):
    functions = public_functions(ast.parse(path.read_text()))
    missing = {f"{f.name} (line {f.lineno})": names for f in functions if (names := untyped(f))}
    assert not missing
