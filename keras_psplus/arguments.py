"""Checks of numbers and flags that a user gives."""

import numbers

import numpy as np


def whole_number(name, value, least, multiple_of=1):
    """Returns an argument as an int.

    Raises:
        ValueError: If it is no int from `least` up, or no multiple.
    """
    good = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not good or value < least or value % multiple_of:
        multiple = f" and a multiple of {multiple_of}" if multiple_of > 1 else ""
        raise ValueError(
            f"`{name}` must be an int from {least} up{multiple}. Received: {name}={value!r}"
        )
    return int(value)


def number(name, value, allowed, holds):
    """Returns an argument as it is.

    Args:
        name: Its name.
        value: What was given.
        allowed: What it may be, for the message.
        holds: Function of a number that tells whether it may be this.

    Raises:
        ValueError: If it is no number, or not one of these.
    """
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not good or not holds(value):
        raise ValueError(f"`{name}` must be {allowed}. Received: {name}={value!r}")
    return value


def flag(name, value, default=None):
    """Returns an option as a bool.

    Args:
        name: Its name.
        value: What was given.
        default: What None stands for; without it, None is refused.

    Raises:
        ValueError: If it is something else.
    """
    if value is None and default is not None:
        return default
    if not isinstance(value, (bool, np.bool_)):
        allowed = "True or False" if default is None else "True, False or None"
        raise ValueError(f"`{name}` must be {allowed}. Received: {name}={value!r}")
    return bool(value)
