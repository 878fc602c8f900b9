"""Route of compressed pieces, in two halves: each replica sums the rows of its rank.

              scatter: encode, exchange, decode       sum              gather: encode, decode
    r0        a0 b0 -> a0 a1                     ->  s0 = a0+a1  ->  s0 s1
    r1        a1 b1 -> b0 b1                     ->  s1 = b0+b1  ->  s0 s1

All replicas decode the same, also the one whose row it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus import compression
from keras_psplus.all_reduce.collectives import gradients
from keras_psplus.compression import kernels
from keras_psplus.compression.methods import without_feedback

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher

# Rows of more than so many blocks are lengthened to whole ones.
_LONG_ROW = 32


def rows_for(
    replicas: int, compressor: compression.Compressor, tensors: Sequence[tf.Tensor]
) -> tuple[int, int]:
    """Shape of the rows that tensors are cut into, one for each replica."""
    size = sum(tensor.shape.num_elements() for tensor in tensors)
    width, multiple = -(-size // replicas), compressor.row_multiple
    if width > _LONG_ROW * multiple:
        # Whole blocks need no copies with padding.
        width = -(-width // multiple) * multiple
    return replicas, width


def split(
    launcher: Launcher,
    rank: int,
    replicas: int,
    compressor: compression.Compressor,
    tensors: Sequence[tf.Tensor],
    state: Any,
    step: tf.Tensor,
) -> tuple[list[tf.Tensor], Any, tf.Tensor]:
    """Sums tensors piece by piece: each replica adds up the pieces of its rank.

    This is a reduce-scatter by an all-to-all of compressed pieces, and an all-gather of the sums,
    compressed again (Alistarh et al., QSGD; Tang et al., 1-bit Adam, with error feedback on both
    sides).

    Args:
        compressor: Compressor that `supports_reduce_scatter`, perhaps in `ErrorFeedback`.
        state: What `split_init` or the last step returned.
        step: int64 scalar.

    Returns:
        List of sums, the new state, and what was sent first.
    """
    rows = rows_for(replicas, compressor, tensors)
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    padding = replicas * rows[1] - sum(sizes)
    flat = [tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in tensors]
    # A copy is what it costs; large tensors have their own buckets.
    whole = len(flat) == 1 and not padding
    mine = tf.reshape(flat[0] if whole else tf.concat([*flat, tf.zeros([padding])], 0), rows)
    sums, state, words = split_rows(launcher, rank, replicas, compressor, mine, state, step)
    parts = [sums] if whole else tf.split(tf.reshape(sums, [-1]), [*sizes, padding])
    sums = [tf.cast(tf.reshape(p, t.shape), t.dtype) for p, t in zip(parts, tensors)]
    return sums, state, words


def split_rows(
    launcher: Launcher,
    rank: int,
    replicas: int,
    compressor: compression.Compressor,
    mine: tf.Tensor,
    state: Any,
    step: tf.Tensor,
    further: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> tuple[tf.Tensor, Any, tf.Tensor]:
    """Sums a matrix over replicas, of which each adds up the row of its rank.

    Args:
        launcher, rank, replicas, compressor, step: As for `split`.
        mine: float32 matrix of one row for each replica.
        state: What `split_init` or the last step returned.
        further: Function of the sum of the row that is this replica's, a matrix of one row, which
            returns what all get in its place; None for the sum itself.

    Returns:
        The matrix of sums, the new state, and what was sent first.
    """
    inner = without_feedback(compressor)
    has_state = inner is not compressor
    server = compression.ErrorFeedback(inner) if has_state else inner
    own_state, piece_state = (state["worker"], state["server"]) if has_state else ((), ())
    piece, words, payload, keep = scatter_row(launcher, replicas, compressor, mine, own_state, step)
    if further is not None:
        piece = further(piece)
    sums, piece_words, keep_piece = gather_row(
        launcher, rank, replicas, server, piece, piece_state, step
    )

    def own() -> tf.Tensor:
        # There is time for what nobody waits for, if it is not done, while the sum is on its way.
        own_payload = tuple(gradients.after([piece_words], part) for part in payload)
        return inner.decode_rows(own_payload, (mine.shape[1],), tf.float32, step)

    if has_state:
        state = {"worker": keep(own), "server": keep_piece()}
    return sums, state, words


def split_init(
    replicas: int, compressor: compression.Compressor, tensors: Sequence[tf.Tensor]
) -> Any:
    """The first state of `split`."""
    return rows_init(compressor, *rows_for(replicas, compressor, tensors))


def rows_init(compressor: compression.Compressor, replicas: int, width: int) -> Any:
    """The first state of `split_rows`."""
    if not isinstance(compressor, compression.ErrorFeedback):
        return ()
    return {
        "worker": compressor.init([replicas, width], tf.float32),
        "server": compression.ErrorFeedback(compressor.inner).init([1, width], tf.float32),
    }


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
