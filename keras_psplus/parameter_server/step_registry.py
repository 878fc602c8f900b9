"""The step functions of each `ParameterServerStrategy`: whose steps may be under way."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_psplus.parameter_server.strategy import ParameterServerStrategy

_functions: weakref.WeakKeyDictionary[ParameterServerStrategy, weakref.WeakSet[Any]] = (
    weakref.WeakKeyDictionary()
)


def register(strategy: ParameterServerStrategy, function: Any) -> None:
    """Adds a function with a method `drain`; it is held weakly."""
    _functions.setdefault(strategy, weakref.WeakSet()).add(function)


def strategies() -> list[ParameterServerStrategy]:
    """The strategies that have functions."""
    return list(_functions)


def functions(strategy: ParameterServerStrategy) -> list[Any]:
    """The functions of a strategy."""
    return list(_functions.get(strategy, ()))


def drain(strategy: ParameterServerStrategy, but: Any = None) -> None:
    """Waits for the steps of all functions and writes what they have counted."""
    for function in functions(strategy):
        if function is not but:
            function.drain()
