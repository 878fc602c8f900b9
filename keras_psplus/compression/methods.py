"""Checks that compressors implement the methods that a strategy calls."""

from keras_psplus.compression.base import Compressor
from keras_psplus.compression.by_variable import ByVariable
from keras_psplus.compression.error_feedback import ErrorFeedback


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
