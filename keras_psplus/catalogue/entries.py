"""Facts about a catalogue entry, read from its source without running it."""

from __future__ import annotations

import ast
import dataclasses
import os
import pathlib
from typing import Any

CLASSES = (
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "HybridStrategy",
    "PipelineStrategy",
    "ModelParallelStrategy",
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A file that defines `strategy()`.

    Attributes:
        title: First line of its docstring.
        strategy: Name of the class of this library that it makes; `"get_strategy"` if it makes
            TensorFlow's default one; None if the source does not tell.
        options: Dict from the arguments that it gives to that class to their values, None for what
            is not a constant.
        accepts: Names of the arguments of its `strategy()`; None if it takes any.
    """

    title: str
    strategy: str | None
    options: dict[str, Any]
    accepts: tuple[str, ...] | None


def read(path: str | os.PathLike[str]) -> Entry:
    """Reads an entry.

    Raises:
        ValueError: If the file is not Python.
    """
    try:
        tree = ast.parse(pathlib.Path(path).read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Received: {str(path)!r}") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [call for call in calls if _name(call) in (*CLASSES, "get_strategy")]
    name, options = None, {}
    if len({_name(call) for call in made}) == 1:  # otherwise the file chooses when it runs
        name = _name(made[0])
        for keyword in made[0].keywords:
            if keyword.arg is not None:
                options[keyword.arg] = getattr(keyword.value, "value", None)
    title = (ast.get_docstring(tree) or "").partition("\n")[0]
    return Entry(title, name, options, _accepts(tree))


def _name(call: ast.Call) -> str | None:
    """Name of the function in a call, without its module."""
    return getattr(call.func, "attr", getattr(call.func, "id", None))


def _accepts(tree: ast.Module) -> tuple[str, ...] | None:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "strategy":
            if node.args.kwarg is not None:
                return None
            return tuple(arg.arg for arg in [*node.args.args, *node.args.kwonlyargs])
    return None  # defined in some other way
