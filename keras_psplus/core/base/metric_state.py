"""Recognises Keras variables that are the states of metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras


def accumulates(variable: keras.Variable) -> bool:
    """Whether a Keras variable is a metric's state, a total over replicas."""
    return bool(variable.synchronization == "on_read" and variable.aggregation == "sum")
