"""The texts of the library's errors and warnings, as its source has them."""

import ast
import dataclasses
import functools
import re

from tests import structure

# Calls of loggers that warn, and those that tell what is going on.
_WARNS = {"warn_once", "warning", "warn", "error", "exception"}
_NOT_OURS = {"NotImplementedError", "StopIteration", "AssertionError", "SystemExit"}
_GAP = "\0"


@dataclasses.dataclass(frozen=True)
class Message:
    """One text.

    Args:
        where: File and line, e.g. `"keras_psplus/log.py:3"`.
        text: The text; `...` stands for what is known when it is raised.
    """

    where: str
    text: str


@functools.cache
def all_messages():
    """Returns the texts of errors that are raised, of warnings, and what ends as errors do.

    Those of which nothing is literal but `Received:`, which functions put together, are left out.
    """
    said = _all(_texts)
    return [each for each in said if re.search("[a-z]{2}", each.text.partition("Received:")[0])]


def all_literals():
    """Returns all texts, also those that functions return for a part of a message."""
    return _all(lambda node: filter(None, [_literal(node)]))


def _all(texts_of):
    found = {}
    for path, tree in structure.trees().items():
        for node in _nodes(tree):
            for text in texts_of(node):
                shown = " ".join(re.sub(f"{_GAP}+", "...", text).split())
                where = f"{path.relative_to(structure.ROOT)}:{node.lineno}"
                found.setdefault((path, shown), Message(where, shown))
    return [message for message in found.values() if re.search("[a-z]{2}", message.text)]


def _nodes(node):
    """Yields a node and all below it, but no parts of a text."""
    yield node
    if not isinstance(node, (ast.JoinedStr, ast.BinOp)) or _literal(node) is None:
        for child in ast.iter_child_nodes(node):
            yield from _nodes(child)


def _texts(node):
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        if _name(node.exc) not in _NOT_OURS:
            yield from filter(None, [_literal(node.exc.args[0])] if node.exc.args else [])
    elif isinstance(node, ast.Call) and _name(node) in _WARNS and node.args:
        yield from filter(None, [_literal(node.args[0])])
    elif isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
        # A text that a function or a constant holds for an error elsewhere.
        text = _literal(node)
        if text and "Received: " in text:
            yield text


def _name(call):
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def _literal(node):
    """The text of an expression, with gaps for what is not literal; None if all of it is not."""
    if isinstance(node, ast.Constant):
        return re.sub(r"%[\d.]*[sdrf]", _GAP, node.value) if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else _GAP for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _literal(node.left), _literal(node.right)
        return None if left is right is None else (left or _GAP) + (right or _GAP)
    return None
