"""Routes of compressed rows, one for each replica, in two halves.

              scatter: encode, exchange, decode       sum              gather: encode, decode
    r0        a0 b0 -> a0 a1                     ->  s0 = a0+a1  ->  s0 s1
    r1        a1 b1 -> b0 b1                     ->  s1 = b0+b1  ->  s0 s1

All replicas decode the same, also the one whose row it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus import compression
from keras_psplus.compression import kernels

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher


def scatter_row(
    launcher: Launcher,
    replicas: int,
    compressor: compression.Compressor,
    mine: tf.Tensor,
    state: Any,
    step: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tuple[tf.Tensor, ...], Callable[..., Any]]:
    """Sums a matrix over replicas; each receives the row of its rank.

    Args:
        launcher: `operations.Launcher` of this replica.
        replicas: Number of replicas.
        compressor: Compressor that `supports_reduce_scatter`, perhaps in `ErrorFeedback`.
        mine: float32 matrix of one row for each replica.
        state: The compressor's state for the matrix.
        step: int64 scalar.

    Returns:
        The sum as a matrix of one row, what was sent, as words and as payload, and a function of
        one that decodes the payload, which returns the new state.
    """
    inner = without_feedback(compressor)
    payload, keep = kernels.encode_rows(compressor, mine, state, step)
    words = compression.pack(payload, replicas)
    received = compression.unpack(launcher.all_to_all(words), payload, replicas)
    return kernels.decode_sum(inner, received, mine.shape[1], replicas, step), words, payload, keep


def gather_row(
    launcher: Launcher,
    rank: int,
    replicas: int,
    compressor: compression.Compressor,
    row: tf.Tensor,
    state: Any,
    step: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, Callable[[], Any]]:
    """Gathers the replicas' rows; all have the same, as they are decoded.

    Args:
        launcher, replicas, compressor, step: As for `scatter_row`.
        rank: This replica's rank.
        row: float32 matrix of one row.
        state: The compressor's state for it.

    Returns:
        The matrix of all rows, the words that were sent, and a function that returns the new state.
    """
    inner = without_feedback(compressor)
    payload, keep = kernels.encode_rows(compressor, row, state, step)
    words = compression.pack(payload, 1)
    forms = [tf.TensorSpec([replicas, *part.shape[1:]], part.dtype) for part in payload]
    everything = compression.unpack(launcher.gather(words), forms, replicas)
    rows = kernels.decode_rows(inner, everything, row.shape[1], step)
    return rows, words, lambda: keep(lambda: rows[rank : rank + 1])


def without_feedback(compressor: compression.Compressor) -> compression.Compressor:
    """The compressor in an `ErrorFeedback`, or the same."""
    return compressor.inner if isinstance(compressor, compression.ErrorFeedback) else compressor
