"""The package gets no larger and no more tangled: limits to lower when the package shrinks.

Public functions have types, for readers and for mypy (`make lint`).
"""

import ast
import importlib

from tests import structure
from tests.support.tables import for_each

LINES = 70_121
# Circles of imports for types alone: how many modules each has, the largest first.
CIRCLES = [3, 2, 2]


def test_lines():
    assert sum(structure.lines(structure.modules().values()).values()) <= LINES


def test_files():
    sizes = structure.lines(structure.modules().values())
    over = {n: s for n, s in sizes.items() if s > structure.LINES_PER_FILE}
    assert not over


def test_folders():
    over = {
        name: count
        for name, count in structure.folders().items()
        if count > structure.MODULES_PER_FOLDER
    }
    assert not over


def test_no_circle_of_imports_at_run_time():
    assert structure.circles(with_types=False) == []


def test_circles_of_imports_for_types():
    found = [len(circle) for circle in structure.circles(with_types=True)]
    allowed = CIRCLES + [0] * len(found)
    assert all(size <= most for size, most in zip(found, allowed)), found


def test_circles_are_found(monkeypatch):
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d"}}
    monkeypatch.setattr(structure, "imports", lambda with_types: graph)
    assert structure.circles(with_types=False) == [["b", "c"]]


def test_public_names_are_there():
    for module, names in structure.public_names().items():
        imported = importlib.import_module(f"keras_psplus.{module}".replace(".keras_psplus", ""))
        assert names and not [name for name in names if not hasattr(imported, name)]


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


@for_each("path", structure.modules().values())
def test_public_functions_have_types(path):
    functions = public_functions(structure.trees()[path])
    missing = {f"{f.name} (line {f.lineno})": names for f in functions if (names := untyped(f))}
    assert not missing
