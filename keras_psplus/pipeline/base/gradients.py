"""Gradients of micro-batches, one after the other, and their sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from keras_psplus.core.batch import duplicate_rows
from keras_psplus.keras_internals.keras_parts import tree
from keras_psplus.tf_internals import record

_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor)


class JoinedCalls:
    """The calls of a layer for all micro-batches, whose gradients are computed in turn.

    A tape by itself would compute the gradients of each layer for all micro-batches, and then those
    of the layer before, so that no stage could begin before the one after it has ended.

    Args:
        total: Function of the list of the variables that the calls have used. It returns the list
            of those that gradients are asked for by, and a function that makes their gradients of
            the list of those by the others. By default they are the same.
    """

    def __init__(self, total: Callable[..., Any] | None = None) -> None:
        self._total = total or (lambda variables: (variables, lambda sums: sums))
        self._calls: list[tuple[tf.GradientTape, list[tf.Tensor], Any]] = []

    def call(self, function: Callable[[], Any], inputs: Any) -> Any:
        """Calls a function for one micro-batch, and returns its outputs."""
        given = differentiable(inputs)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(given)
            outputs = function()
        self._calls.append((tape, given, outputs))
        return outputs

    def join(self, join: Callable[[list[Any]], Any], sizes: list[int]) -> Any:
        """Joins the outputs of all micro-batches.

        Args:
            join: Function of the list of all outputs, which are structures of tensors.
        """
        with record.stop_recording():
            joined = join([outputs for _, _, outputs in self._calls])
        if any(isinstance(leaf, _COMPOSITE) for leaf in tree.flatten(joined)) and len(sizes) > 1:
            raise ValueError(
                "A pipeline's model must return dense tensors: those of micro-batches are joined, "
                "and gradients cut, by rows. Convert what it returns (`to_tensor()`, "
                "`tf.sparse.to_dense`), or pass `microbatches=1` to the strategy. "
                f"Received: {joined}"
            )
        outside = [leaf for leaf in tree.flatten(joined) if _has_gradient(leaf)]
        if not outside:
            return joined
        variables = _unique(v for tape, _, _ in self._calls for v in tape.watched_variables())
        inputs = [tensor for _, given, _ in self._calls for tensor in given]
        asked_for, total = self._total(variables)

        def gradients(*of_joined: Any) -> list[Any]:
            of_inputs, sums, first = [], [None] * len(variables), 0
            for (tape, given, outputs), size in zip(self._calls, sizes):
                inside = [leaf for leaf in tree.flatten(outputs) if _has_gradient(leaf)]
                own = list(of_joined)
                if len(sizes) > 1:
                    own = [_rows(gradient, first, size) for gradient in of_joined]
                found = tape.gradient(inside, [*given, *variables], output_gradients=own)
                of_inputs += found[: len(given)]
                sums = [add(a, b) for a, b in zip(sums, found[len(given) :])]
                first += size
            return [*of_inputs, *total(sums)]

        handles = [variable.handle for variable in asked_for]
        record.record_operation("PipelineModel", outside, [*inputs, *handles], gradients)
        return joined


def differentiable(structure: Any) -> list[tf.Tensor]:
    """The tensors of a structure that can have gradients, each once."""
    return _unique(leaf for leaf in tree.flatten(structure) if _has_gradient(leaf))


def add(total: Any, gradient: Any) -> Any:
    """Adds a gradient to a sum of gradients; either may be None, or `tf.IndexedSlices`."""
    if total is None or gradient is None:
        return gradient if total is None else total
    if isinstance(total, tf.IndexedSlices) and isinstance(gradient, tf.IndexedSlices):
        return duplicate_rows.joined(total, gradient)
    added = tf.convert_to_tensor(total) + tf.convert_to_tensor(gradient)
    # TensorFlow makes one sum of sums, with all micro-batches' gradients in memory at once, but
    # not across a change of shape.
    return tf.squeeze(tf.expand_dims(added, 0), 0)


def as_rows_of(tensor: Any, rows: Any, before: int, after: int) -> Any:
    """Rows of a tensor that have come by themselves, with gradients by the tensor.

    Args:
        rows: Some of its rows.
        before: How many rows it has before them.
        after: How many it has after them.
    """
    if not _has_gradient(tensor):
        return rows
    with record.stop_recording():
        same = tf.identity(rows)

    def gradient(of_rows: tf.Tensor | tf.IndexedSlices) -> list[tf.Tensor]:
        others = [[0, 0]] * (rows.shape.rank - 1)
        return [tf.pad(tf.convert_to_tensor(of_rows), [[before, after], *others])]

    record.record_operation("RowsOfBatch", [same], [tensor], gradient)
    return same


def _rows(tensor: tf.Tensor, first: int, count: int) -> tf.Tensor:
    rows = tensor[first : first + count]
    # TensorFlow may not know how many rows the batch has.
    rows.set_shape([count, *rows.shape[1:]])
    return rows


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and (leaf.dtype.is_floating or leaf.dtype.is_complex)


def _unique(found: Iterable[Any]) -> list[Any]:
    return list({id(one): one for one in found}.values())
