"""How this process is about to end: Python does not tell that to functions of `atexit`."""

import functools
import sys

_codes = []


def watch():
    """Notes from now on what `sys.exit` is called with."""
    if hasattr(sys.exit, "is_watched"):
        return

    @functools.wraps(sys.exit)
    def leave(status=None, /):
        _codes.append(status)
        leave.__wrapped__(status)

    leave.is_watched = True
    sys.exit = leave


def last():
    """What `sys.exit` was called with last; 1, Python's own code, if it was not called."""
    return _codes[-1] if _codes else 1


def is_bad():
    """Whether the script ends by an exception, or with an exit code of failure."""
    has_failed = bool(_codes) and _codes[-1] not in (None, 0)
    return has_failed or getattr(sys, "last_value", None) is not None
