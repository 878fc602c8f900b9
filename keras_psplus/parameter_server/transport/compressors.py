"""Compressors of variables' gradients and of their values."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_psplus import compression
from keras_psplus.compression import ByVariable, Compressor, methods

_FOR_VALUES = (
    'None, "bf16", "fp16", "int8", `Cast`, `Int8`, a `ByVariable` or dict of these, or a '
    "compressor of your own with `supports_values = True`"
)


class Compressors:
    """The compressors of one strategy, from `compression` and `pull_compression`.

    Raises:
        ValueError: If one of them is unknown, or cannot do what it is asked for.
    """

    def __init__(
        self,
        push: Compressor | str | dict[Any, Any] | None,
        pull: Compressor | str | dict[Any, Any] | None,
    ) -> None:
        push = compression.get(push)
        for compressor in methods.each(push):
            _check_that_it_encodes("compression", compressor)
        self._push = compression.with_error_feedback(push)
        pull = compression.get(pull, "pull_compression", _FOR_VALUES)
        for compressor in methods.each(pull):
            _check_that_it_encodes("pull_compression", compressor)
            _check_that_it_serves_values(compressor)
        if pull is not None and not isinstance(pull, ByVariable):
            # Small variables cost their message, not their bytes, and vectors are those that
            # suffer: biases, and the scales and shifts of normalisations.
            pull = ByVariable({}, default=pull)
        self._pull = pull

    def of_gradient(self, variable: tf.Variable) -> Compressor | None:
        """The compressor of a variable's gradient, with error feedback if it needs it, or None."""
        return _chosen(self._push, variable)

    def of_value(self, variable: tf.Variable) -> Compressor | None:
        """The compressor that a worker reads a variable through, or None.

        Only what was made to be trained is read so. Other variables are optimizers' own, or, as
        the averages of BatchNormalization, read in order to be written again with a small change,
        which rounding would swallow.
        """
        if self._pull is None or not variable.trainable:
            return None
        compressor = _chosen(self._pull, variable)
        if compressor is not None:
            # It may be one that `for_variable` has made just now.
            _check_that_it_serves_values(compressor)
        return compressor


def path_of(variable: tf.Variable) -> str:
    """A variable's path as Keras has it, such as `"sequential/dense/kernel"`."""
    return getattr(variable, "keras_path", None) or variable.name.split(":")[0]


def _chosen(compressor: Compressor | None, variable: tf.Variable) -> Compressor | None:
    if compressor is None or not variable.dtype.is_floating:
        return None
    return compressor.for_variable(path_of(variable), variable.shape, variable.dtype)


def _check_that_it_encodes(argument: str, compressor: Compressor) -> None:
    method = methods.missing(compressor, "encode", "decode")
    if method:
        raise ValueError(
            f"`{argument}` must have `encode` and `decode`: on the way between a worker and a "
            "parameter server there are no rounds in which workers average. "
            f"Received: {argument}={compressor!r}, without `{method}`"
        )


def _check_that_it_serves_values(compressor: Compressor) -> None:
    if not compressor.supports_values:
        raise ValueError(
            "`pull_compression` must keep every element of a variable nearly as it is, at every "
            f"read: {_FOR_VALUES}. Signs, some of the elements and low ranks are for gradients, "
            "whose sum over steps counts (`compression`). "
            f"Received: pull_compression={compressor!r}"
        )
