"""Routes of compressed gradients, from all replicas to all replicas.

Payloads whose mean is the payload of the mean are summed by all-reduce. If a compressor can encode
pieces, each replica sums one piece, and sends its sum compressed once more. Other payloads are
gathered. All routes use TensorFlow's collectives, and the computation afterwards is the same on all
replicas, so the results are too, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from keras_psplus import compression
from keras_psplus.all_reduce.collectives import gradients
from keras_psplus.compression import kernels

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher


class Bucket(NamedTuple):
    """Gradients that are summed together: what is known of each, in one order."""

    tensors: list[tf.Tensor]
    # None for those that are sent as they are.
    compressors: list[Any]
    paths: list[str]
    numbers: list[int]


def total(
    launcher: Launcher,
    compressors: Sequence[compression.Compressor],
    tensors: Sequence[tf.Tensor],
    step: tf.Tensor,
) -> list[tf.Tensor]:
    """Sums tensors by adding up payloads of stateless, linear compressors.

    Args:
        compressors: List of reducible compressors that are `is_linear`.
        step: int64 scalar.
    """
    payloads = [c.encode(tensor, (), step)[0] for c, tensor in zip(compressors, tensors)]
    summed = gradients.sum_packed(launcher, tf.nest.flatten(payloads))
    sums = tf.nest.pack_sequence_as(payloads, summed)
    return [c.decode(s, t.shape, t.dtype, step) for c, s, t in zip(compressors, sums, tensors)]


def mean(
    launcher: Launcher,
    replicas: int,
    compressors: Sequence[compression.Compressor],
    tensors: Sequence[tf.Tensor],
    states: list[Any],
    step: tf.Tensor,
) -> tuple[list[tf.Tensor], list[Any]]:
    """Averages tensors whose payloads can be added up on their way.

    Args:
        compressors: List of reducible compressors.
        step: int64 scalar.

    Returns:
        Lists of means and of new states.
    """

    def all_mean(payloads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        # Divided first: sums of float16 could overflow.
        parts = [payload / tf.cast(replicas, payload.dtype) for payload in payloads]
        return gradients.sum_packed(launcher, parts)

    means, _, states = compression.exchange_means(compressors, tensors, states, step, all_mean)
    return means, states


def gather(
    launcher: Launcher,
    replicas: int,
    compressors: Sequence[compression.Compressor],
    tensors: Sequence[tf.Tensor],
    states: Sequence[Any],
    step: tf.Tensor,
) -> tuple[list[tf.Tensor], list[Any], list[tuple[tf.Tensor, ...]]]:
    """Sums tensors by gathering all payloads and adding them up in rank order.

    Args:
        step: int64 scalar.

    Returns:
        Lists of sums, of new states, and of the payloads.
    """
    payloads, new_states = zip(
        *(kernels.encode(c, t, s, step) for c, t, s in zip(compressors, tensors, states))
    )
    words = [compression.pack(payload) for payload in payloads]
    sizes = [tf.shape(w)[1] if w.shape[1] is None else w.shape[1] for w in words]
    everything = _gather_words(launcher, replicas, tf.concat(words, 1), compressors)

    sums = [None] * len(tensors)
    starts = [0, *itertools.accumulate(sizes)]
    at_once = [i for i, c in enumerate(compressors) if c.has_sum_decode]
    for i in at_once:
        rows = everything[:, starts[i] : starts[i + 1]]
        rows = compression.unpack(rows, payloads[i], tf.constant(replicas))
        sums[i] = kernels.add_rows(compressors[i], rows, tensors[i].shape, step)
    one_by_one = [i for i in range(len(tensors)) if i not in at_once]

    def add(rank: tf.Tensor, totals: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        added = []
        for i, total in zip(one_by_one, totals):
            piece = everything[rank, starts[i] : starts[i + 1]]
            payload = compression.unpack(piece[tf.newaxis], payloads[i])
            # As it was written: kernels may need what an encoder's shapes say.
            payload = tuple(tf.ensure_shape(p, own.shape) for p, own in zip(payload, payloads[i]))
            added.append(compressors[i].add_to(total, payload, tensors[i].dtype, step))
        return rank + 1, added

    if one_by_one:
        zeros = [tf.zeros(tensors[i].shape) for i in one_by_one]
        _, totals = tf.while_loop(
            lambda rank, _: rank < replicas, add, (0, zeros), maximum_iterations=replicas
        )
        for i, total in zip(one_by_one, totals):
            sums[i] = total
    sums = [tf.cast(total, tensor.dtype) for total, tensor in zip(sums, tensors)]
    return sums, list(new_states), list(payloads)


def gather_rows(
    launcher: Launcher,
    compressor: compression.Compressor,
    slices: tf.IndexedSlices,
    step: tf.Tensor,
) -> tuple[tf.IndexedSlices, tf.Tensor, tf.Tensor]:
    """Concatenates the slices of all replicas in rank order, values compressed row by row.

    Args:
        step: int64 scalar.

    Returns:
        `tf.IndexedSlices`, the words of one row, and the vector of the replicas' rows.
    """
    values, indices = slices.values, slices.indices
    payload = (*compressor.encode_rows(values, step), indices[:, tf.newaxis])
    words = compression.pack(payload, tf.shape(indices)[0])
    words, counts = launcher.gather_rows(words)
    *encoded, indices = compression.unpack(words, payload, tf.shape(words)[0])
    values = compressor.decode_rows(tuple(encoded), tuple(values.shape[1:]), values.dtype, step)
    return tf.IndexedSlices(values, tf.reshape(indices, [-1]), slices.dense_shape), words, counts


def _gather_words(
    launcher: Launcher, replicas: int, words: tf.Tensor, compressors: Sequence[object]
) -> tf.Tensor:
    if words.shape.is_fully_defined():
        return launcher.gather(words)
    # As many on each replica, but not known to the graph: as rows of one word.
    gathered, counts = launcher.gather_rows(tf.reshape(words, [-1, 1]))
    same = tf.reduce_all(counts == counts[0])
    message = (
        "All workers must send payloads of the same length at a step; a length may depend on the "
        f"step, not on the gradient. Received: words from each worker, by {compressors}:"
    )
    with tf.control_dependencies([tf.debugging.Assert(same, [message, counts], summarize=-1)]):
        return tf.reshape(gathered, [replicas, -1])
