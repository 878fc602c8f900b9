"""Variables of parameter servers replaced by a worker's copies while a step is traced.

Inside the context a variable's handle is that of the worker's copy: reads, the tape and optimizers'
updates use the copy, and nothing is sent to the server.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf

_local = threading.local()


class LocalCopies:
    """Context in which variables are the worker's copies of them.

    Args:
        handles: Dict from ids of variables to handles.
    """

    def __init__(self, handles: Mapping[int, tf.Tensor]) -> None:
        self._handles = handles

    def __enter__(self) -> LocalCopies:
        self._outer, _local.handles = getattr(_local, "handles", None), self._handles
        return self

    def __exit__(self, *exc: object) -> None:
        _local.handles = self._outer


def are_in_use() -> bool:
    """Whether a step that a worker takes alone is being traced."""
    return getattr(_local, "handles", None) is not None


def handle_of(variable: tf.Variable) -> tf.Tensor | None:
    """The handle of the worker's copy of a variable, or None."""
    handles = getattr(_local, "handles", None)
    return None if handles is None else handles.get(id(variable))
