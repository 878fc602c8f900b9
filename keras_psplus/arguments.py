"""Checks of numbers, flags, times and texts that a user gives."""

import numbers
import os
from collections.abc import Callable
from typing import Any

import numpy as np

# Two of them add up to one of TensorFlow's integers of 64 bits.
MOST = 2**62
# About 23 days: operating systems count milliseconds in 32 bits.
MOST_SECONDS = 2_000_000


def whole_number(name: str, value: Any, least: int, multiple_of: int = 1, most: int = MOST) -> int:
    """Returns an argument as an int."""
    good = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not good or value < least or value % multiple_of:
        multiple = f" and a multiple of {multiple_of}" if multiple_of > 1 else ""
        raise ValueError(
            f"`{name}` must be an int from {least} up{multiple}. Received: {name}={shown(value)}"
        )
    if value > most:
        raise ValueError(f"`{name}` must be at most {most}. Received: {name}={shown(value)}")
    return int(value)


def number(name: str, value: Any, allowed: str, holds: Callable[[Any], Any]) -> Any:
    """Returns an argument as it is.

    Args:
        allowed: What it may be, for the message.
        holds: Function of a number that tells whether it may be this.
    """
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        good = good and (float(value), bool(holds(value)))[1]
    except OverflowError:
        good = False
    if not good:
        raise ValueError(f"`{name}` must be {allowed}. Received: {name}={shown(value)}")
    return value


def seconds(name: str, value: Any, or_none: bool = False) -> Any:
    """Returns a number of seconds as it is."""
    if value is None and or_none:
        return None
    allowed = f"a positive number of seconds, at most {MOST_SECONDS}{', or None' * or_none}"
    return number(name, value, allowed, lambda v: 0 < v <= MOST_SECONDS)


def text(name: str, value: Any) -> str | None:
    """Returns a text, or None as it is."""
    if value is not None and not (isinstance(value, str) and value):
        raise ValueError(f"`{name}` must be a text, or None. Received: {name}={shown(value)}")
    return value


def folder(name: str, value: Any) -> str | os.PathLike[str] | None:
    """Returns a path, or None as it is."""
    path: Any = os.fspath(value) if isinstance(value, os.PathLike) else value
    if value is not None and not (isinstance(path, str) and path and "\0" not in path):
        raise ValueError(
            f"`{name}` must be the path of a folder, or None. Received: {name}={shown(value)}"
        )
    given: str | os.PathLike[str] | None = value
    return given


def flag(name: str, value: Any, default: bool | None = None) -> bool:
    """Returns an option as a bool.

    Args:
        default: What None stands for; without it, None is refused.
    """
    if value is None and default is not None:
        return default
    if not isinstance(value, (bool, np.bool_)):
        allowed = "True or False" if default is None else "True, False or None"
        raise ValueError(f"`{name}` must be {allowed}. Received: {name}={shown(value)}")
    return bool(value)


def shown(value: Any) -> str:
    """Representation of a value for messages.

    Python does not print ints of thousands of digits.
    """
    try:
        return repr(value)
    except ValueError:
        return f"a {type(value).__name__} too long to be shown"
