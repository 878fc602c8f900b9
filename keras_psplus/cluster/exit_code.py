"""How this process is about to end: Python does not tell that to functions of `atexit`."""

import sys
from collections.abc import Callable
from typing import Any


class _Exits:
    """What `sys.exit` was called with, from when it is watched.

    Attributes:
        is_watching: Whether calls are noted.
        codes: List of what it was called with.
    """

    def __init__(self) -> None:
        self.is_watching = False
        self.codes: list[Any] = []

    def note(self, original: Callable[[Any], None], status: Any = None, /) -> None:
        """`sys.exit`, which is replaced like functions of Keras; see `keras_hooks.process`."""
        self.codes.append(status)
        original(status)


EXITS = _Exits()


def watch() -> None:
    """Notes from now on what `sys.exit` is called with."""
    EXITS.is_watching = True


def last() -> Any:
    """What `sys.exit` was called with last; 1, Python's own code, if it was not called."""
    return EXITS.codes[-1] if EXITS.codes else 1


def is_bad() -> bool:
    """Whether the script ends by an exception, or with an exit code of failure."""
    has_failed = bool(EXITS.codes) and EXITS.codes[-1] not in (None, 0)
    return has_failed or getattr(sys, "last_value", None) is not None
