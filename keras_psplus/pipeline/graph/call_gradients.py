"""Gradients of one call of a function, in the place of a tape's.

Where several tapes record a call that is compiled, TensorFlow prepares for gradients of gradients:
the function would compute its own gradients, too, each time that it is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_psplus.tf_internals import record, resource_variable_ops


class CallGradients:
    """Context of a call that no tape records, with the methods of one.

    Args:
        variables: The variables that the function reads.
    """

    def __init__(self, variables: Sequence[tf.Variable]) -> None:
        self._variables = [one for one in variables if one.trainable]
        self._stopped = contextlib.ExitStack()

    def __enter__(self) -> CallGradients:
        self._stopped.enter_context(record.stop_recording())
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stopped.close()
        for variable in self._variables:
            # Tapes outside ask for gradients by what they have seen read.
            resource_variable_ops.variable_accessed(variable)

    def watch(self, tensors: Sequence[tf.Tensor]) -> None:
        """Does nothing: gradients by all arguments can be computed."""

    def watched_variables(self) -> Sequence[tf.Variable]:
        """The trainable variables that the function reads."""
        return self._variables

    def gradient(
        self, outputs: Sequence[tf.Tensor], sources: Sequence[Any], output_gradients: Sequence[Any]
    ) -> list[Any]:
        """Gradients of the call by its arguments, which nothing but the call uses.

        Args:
            outputs: List of results of the call.
            sources: List of arguments and variables.
            output_gradients: Gradients by the outputs, or None.
        """
        pairs = [(out, grad) for out, grad in zip(outputs, output_gradients) if grad is not None]
        if not pairs or not sources:
            return [None] * len(sources)
        found: list[Any] = tf.gradients(
            [out for out, _ in pairs],
            list(sources),
            grad_ys=[grad for _, grad in pairs],
            # Calls before this one may use its variables, too: these have their own gradients.
            stop_gradients=[one for one in sources if isinstance(one, tf.Tensor)],
        )
        return found
