"""Variables of parameter servers of which a worker has copies of its own, while a step is traced.

Inside the context a variable's handle is that of the worker's copy: reads, the tape and whatever an
optimizer does to it meet the copy, and the server hears nothing of it.
"""

import threading

_local = threading.local()


class LocalCopies:
    """Context in which variables are the worker's copies of them.

    Args:
        handles: Dict from ids of variables to handles.
    """

    def __init__(self, handles):
        self._handles = handles

    def __enter__(self):
        self._outer, _local.handles = getattr(_local, "handles", None), self._handles
        return self

    def __exit__(self, *exc):
        _local.handles = self._outer


def are_in_use():
    """Whether a step that a worker takes alone is being traced."""
    return getattr(_local, "handles", None) is not None


def handle_of(variable):
    """The handle of the worker's copy of a variable, or None."""
    handles = getattr(_local, "handles", None)
    return None if handles is None else handles.get(id(variable))
