"""Checks of compressors' methods, and the one that stands for none."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_psplus.compression.base import Compressor
from keras_psplus.compression.by_variable import ByVariable
from keras_psplus.compression.error_feedback import ErrorFeedback


class Identity(Compressor):
    """Sends a tensor as it is, where others are compressed."""

    reducible = True

    def encode(self, tensor: tf.Tensor, state: Any, step: Any) -> tuple[tuple[tf.Tensor, ...], Any]:
        return (tensor,), state

    def decode(
        self, payload: tuple[tf.Tensor, ...], shape: Any, dtype: Any, step: Any
    ) -> tf.Tensor:
        return payload[0]

    def wire_bytes(self, shape: Any, dtype: Any, step: int | None = None) -> int:
        return self.row_bytes(shape, dtype)


IDENTITY = Identity()


def each(compressor: Compressor | None) -> list[Compressor]:
    """The compressors that a compressor chooses between.

    Returns:
        List of `Compressor`s: those of a `ByVariable`, otherwise itself.
    """
    if isinstance(compressor, ByVariable):
        choices = [*compressor.patterns.values(), compressor.default]
        return [inner for choice in choices for inner in each(choice)]
    return [] if compressor is None else [compressor]


def without_feedback(compressor: Compressor) -> Compressor:
    """The compressor in an `ErrorFeedback`, or the same."""
    return compressor.inner if isinstance(compressor, ErrorFeedback) else compressor


def missing(compressor: Compressor, *names: str) -> str | None:
    """Finds a method that a compressor leaves to the base class.

    Args:
        compressor: `Compressor`; of an `ErrorFeedback`, the methods of its inner one count.

    Returns:
        The first of the names whose method is the base class's own, or None.
    """
    inner = without_feedback(compressor)
    return next((n for n in names if getattr(type(inner), n) is getattr(Compressor, n)), None)
