"""Exit code of this process, which Python does not pass to `atexit` functions."""

import sys
from typing import Any

from keras_psplus.engine import Call


class _Exits:
    """Arguments of `sys.exit` since recording began.

    Attributes:
        is_watching: Whether calls are noted.
        codes: List of the arguments, in order.
    """

    def __init__(self) -> None:
        self.is_watching = False
        self.codes: list[Any] = []

    def note(self, call: Call) -> None:
        """`sys.exit`, which is replaced like functions of Keras; see `keras_hooks.runtime`."""
        self.codes.append(call.owner)
        call.proceed()


EXITS = _Exits()


def watch() -> None:
    """Notes from now on what `sys.exit` is called with."""
    EXITS.is_watching = True


def last() -> Any:
    """The last argument of `sys.exit`, or 1 if it was not called.

    1 is Python's exit code after an exception.
    """
    return EXITS.codes[-1] if EXITS.codes else 1


def is_bad() -> bool:
    """Whether the script ends by an exception, or with an exit code of failure."""
    has_failed = bool(EXITS.codes) and EXITS.codes[-1] not in (None, 0)
    return has_failed or getattr(sys, "last_value", None) is not None
