"""Different compressors for different variables."""

from __future__ import annotations

import collections.abc
import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from keras_psplus.arguments import shown, whole_number
from keras_psplus.compression.base import Compressor, DType, Shape


class ByVariable(Compressor):
    """Chooses a compressor for each variable by its path and shape.

    Strategies call `for_variable`, and then only use what it returns.

    Args:
        patterns: Dict from patterns to compressors or None (send as it is). A pattern is a string
            as in a shell, for the whole path (`"*/embedding/*"`), or a `re.compile`d one, searched
            for in it. The first that fits counts.
        default: Compressor of variables that no pattern fits, or None.
        min_size: Variables of fewer elements are left alone, whatever their path.
        min_rank: So are those of fewer axes: by default biases and other vectors.

    Raises:
        ValueError: If `patterns` is not a dict from strings or compiled regular expressions to
            compressors or None, or another argument does not fit.

    Example:

    >>> by_variable = keras_psplus.compression.ByVariable(
    ...     {"*/kernel": keras_psplus.compression.PowerSGD(4), "*embed*": None},
    ...     default=keras_psplus.compression.Int8(),
    ... )
    >>> by_variable.for_variable("dense/bias", [100], "float32") is None
    True
    """

    # Those that it chooses have their own residuals.
    takes_feedback = False

    def __init__(
        self,
        patterns: Mapping[Any, Compressor | None],
        default: Compressor | None = None,
        min_size: int = 1024,
        min_rank: int = 2,
    ) -> None:
        if not isinstance(patterns, collections.abc.Mapping):
            raise ValueError(
                "`patterns` must be a dict from patterns of variable paths to compressors or None. "
                f"Received: patterns={shown(patterns)}"
            )
        for pattern, compressor in [*patterns.items(), ("*", default)]:
            if not isinstance(pattern, (str, re.Pattern)):
                raise ValueError(
                    "a pattern must be a string or a compiled regular expression. "
                    f"Received: pattern={shown(pattern)}"
                )
            if not (compressor is None or isinstance(compressor, Compressor)):
                raise ValueError(
                    "a pattern must stand for a compressor or None; "
                    "`keras_psplus.compression.get` makes one of a name. "
                    f"Received: {shown(pattern)}: {shown(compressor)}"
                )
        self.patterns = dict(patterns)
        self.default = default
        self.min_size = whole_number("min_size", min_size, 0)
        self.min_rank = whole_number("min_rank", min_rank, 0)

    def for_variable(self, path: str, shape: Shape, dtype: DType) -> Compressor | None:
        shape = tf.TensorShape(shape)
        if shape.rank < self.min_rank or shape.num_elements() < self.min_size:
            return None
        fitting = (c for pattern, c in self.patterns.items() if _fits(pattern, path))
        compressor = next(fitting, self.default)
        return None if compressor is None else compressor.for_variable(path, shape, dtype)

    def map(self, function: Callable[[Compressor | None], Compressor | None]) -> ByVariable:
        """Applies a function to each compressor; returns a new `ByVariable`.

        Args:
            function: Takes a compressor or None, and returns one.
        """
        patterns = {pattern: function(c) for pattern, c in self.patterns.items()}
        return ByVariable(patterns, function(self.default), self.min_size, self.min_rank)


def _fits(pattern: str | re.Pattern[str], path: str) -> bool:
    if isinstance(pattern, re.Pattern):
        return pattern.search(path) is not None
    return fnmatch.fnmatchcase(path, pattern)
