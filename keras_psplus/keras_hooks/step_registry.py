"""The step functions of each `ParameterServerStrategy`: whose steps may be under way."""

import weakref

_functions = weakref.WeakKeyDictionary()


def register(strategy, function):
    """Adds a function with a method `drain`; it is held weakly."""
    _functions.setdefault(strategy, weakref.WeakSet()).add(function)


def strategies():
    """The strategies that have functions."""
    return list(_functions)


def functions(strategy):
    """The functions of a strategy."""
    return list(_functions.get(strategy, ()))


def drain(strategy, but=None):
    """Waits for the steps of all functions and writes what they have counted."""
    for function in functions(strategy):
        if function is not but:
            function.drain()
