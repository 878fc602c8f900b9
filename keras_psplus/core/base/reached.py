"""Optimizers, metrics and variables that a model reaches, whether they are attributes or not.

Keras saves the attributes of layers. A train_step may use more: what is in objects of the script's
own, in closures, or in global names that its functions read.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import keras
import tensorflow as tf

# Objects and functions of these packages hold nothing of a script's.
_LIBRARIES = frozenset(
    "keras tensorflow keras_psplus numpy keras_hub keras_rs pandas scipy sklearn torch jax grain "
    "h5py PIL absl google".split()
) | set(sys.stdlib_module_names)
# Attributes of layers that only lead back to other ones.
_INTERNAL = ("_self_", "_tracker", "_distribute_strategy", "_inbound", "_outbound", "_parent_path")
# Of objects that are looked at; more are no optimizers, but data.
_MOST_OBJECTS, _MOST_ELEMENTS, _MOST_DEPTH = 20_000, 1_000, 12
_FOUND = (keras.optimizers.Optimizer, keras.metrics.Metric, keras.Variable, tf.Variable)
_Finds: TypeAlias = Iterator[tuple[str, Any, bool]]


def objects_of(model: keras.Model) -> Iterator[tuple[str, Any, bool]]:
    """Finds optimizers, metrics and variables by their names.

    Args:
        model: The model. Layers that it does not have, but reaches, count as their variables.

    Yields:
        Triples of a name, which is the same in each process that runs the script, an object, and
        whether Keras finds it, too: it is an attribute of a layer, or in a list or dict that is.
    """
    yield from _Search().in_layers("", model)


class _Search:
    """One walk through the objects that a model reaches; each of them is seen once."""

    def __init__(self) -> None:
        # Objects by id, as an id may be another's once an object is gone.
        self._seen: dict[int, Any] = {}

    def in_layers(self, prefix: str, model: keras.Layer) -> _Finds:
        """Looks through a model and the layers that it has."""
        layers = list(model._flatten_layers())
        self._seen.update((id(layer), layer) for layer in layers)
        for number, layer in enumerate(layers):
            of_layer = f"_of_layer_{number}" if number else ""
            for attribute, value in list(vars(layer).items()):
                if attribute.startswith(_INTERNAL):
                    continue
                name = f"{prefix}{attribute}{of_layer}"
                if isinstance(value, dict):
                    value = list(value.values())
                for i, one in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                    yield from self._look(f"{name}_{i}" if i else name, one, 0, not prefix)
        for number, layer in enumerate(layers):
            yield from self._look_at_class(f"{prefix}layer_{number}", layer, 0)

    def _look(self, name: str, value: Any, depth: int, is_attribute: bool = False) -> _Finds:
        if id(value) in self._seen or _is_plain(value) or depth > _MOST_DEPTH:
            return
        if len(self._seen) > _MOST_OBJECTS:
            return
        self._seen[id(value)] = value
        if isinstance(value, _FOUND):
            yield name, value, is_attribute
        elif isinstance(value, keras.random.SeedGenerator):
            yield f"{name}/state", value.state, False
        elif isinstance(value, keras.Layer):
            for i, variable in enumerate(value.variables):
                yield from self._look(f"{name}/{i}", variable, depth + 1)
            yield from self.in_layers(f"{name}/", value)
        elif isinstance(value, dict):
            yield from self._look_at(name, list(value.values())[:_MOST_ELEMENTS], depth)
        elif isinstance(value, (list, tuple)):
            yield from self._look_at(name, value[:_MOST_ELEMENTS], depth)
        else:
            yield from self._look_into(name, value, depth)

    def _look_at(self, name: str, values: Iterable[Any], depth: int) -> _Finds:
        for i, value in enumerate(values):
            yield from self._look(f"{name}/{i}", value, depth + 1)

    def _look_into(self, name: str, value: Any, depth: int) -> _Finds:
        """Looks at what a function uses, or at an object's attributes and methods."""
        if isinstance(value, functools.partial):
            parts = [value.func, *value.args, *value.keywords.values()]
            yield from self._look_at(name, parts, depth)
        elif isinstance(value, types.MethodType):
            yield from self._look_at(name, [value.__self__, value.__func__], depth)
        elif isinstance(function := _function(value), types.FunctionType):
            if not _is_of_library(function.__module__):
                for used, one in _used_by(function):
                    yield from self._look(f"{name}/{used}", one, depth + 1)
        elif not _is_of_library(type(value).__module__):
            for attribute, one in list(getattr(value, "__dict__", {}).items()):
                yield from self._look(f"{name}/{attribute}", one, depth + 1)
            yield from self._look_at_class(name, value, depth)

    def _look_at_class(self, name: str, value: object, depth: int) -> _Finds:
        """Looks at what the methods of an object's class use."""
        for cls in type(value).__mro__:
            if _is_of_library(cls.__module__):
                continue
            for attribute, member in list(vars(cls).items()):
                for one in _functions(member):
                    yield from self._look(f"{name}/{attribute}", one, depth + 1)


def _functions(member: Any) -> list[Any]:
    """Functions of a class's member; other members, such as optimizers, are returned unchanged."""
    if isinstance(member, property):
        return [one for one in (member.fget, member.fset) if one is not None]
    if isinstance(member, (staticmethod, classmethod)):
        return [member.__func__]
    return [member]


def _function(value: Any) -> Any:
    """The Python function of what wraps one, as `tf.function` does."""
    value = getattr(value, "python_function", value)
    return getattr(value, "__wrapped__", value) if callable(value) else value


def _used_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Named objects of a function's closure, globals and defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # It is empty up to now.
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for i, value in enumerate(function.__defaults__ or ()):
        yield f"default_{i}", value


@functools.lru_cache(4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    names = {
        one.argval
        for one in dis.get_instructions(code)
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names.update(_global_names(inner))
    return tuple(sorted(names))


def _is_plain(value: object) -> bool:
    return value is None or isinstance(
        value, (bool, int, float, complex, str, bytes, type, types.ModuleType, tf.Tensor, set)
    )


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
