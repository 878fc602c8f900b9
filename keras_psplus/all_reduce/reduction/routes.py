"""Routes of compressed gradients, from all replicas to all replicas.

Payloads whose mean is the payload of the mean are summed by all-reduce. If a compressor can encode
pieces, each replica sums one piece, and sends its sum compressed once more. Other payloads are
gathered. All routes use TensorFlow's collectives, and the computation afterwards is the same on all
replicas, so the results are too, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from keras_psplus import compression
from keras_psplus.all_reduce.collectives import gradients
from keras_psplus.all_reduce.collectives.operations import Launcher
from keras_psplus.all_reduce.collectives.size_classes import padded_size
from keras_psplus.compression import kernels
from keras_psplus.compression.methods import without_feedback

if TYPE_CHECKING:
    from keras_psplus.compression.outer_products import OuterProduct


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


# Route of compressed pieces, in two halves: each replica sums the rows of its rank.
#
#               scatter: encode, exchange, decode       sum              gather: encode, decode
#     r0        a0 b0 -> a0 a1                     ->  s0 = a0+a1  ->  s0 s1
#     r1        a1 b1 -> b0 b1                     ->  s1 = b0+b1  ->  s0 s1
#
# All replicas decode the same, also the one whose row it is.


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
    return rows_init(compressor, *rows_for(replicas, compressor, tensors))


def rows_init(compressor: compression.Compressor, replicas: int, width: int) -> Any:
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


# Sums of products: the factors of all replicas, gathered and multiplied on each.
#
# The number of rows may differ between replicas and from step to step, and all must choose the same
# way, so they tell each other first, once for all products.


def most_rows(launcher: Launcher, products: Sequence[OuterProduct]) -> list[tf.Tensor]:
    """Largest number of rows of each product on any replica, on the host."""
    # Of what went into layers: this waits for no gradient. On a GPU, shapes are on the host anyway.
    rows = [tf.shape(product.left)[0] for product in products]
    with launcher.separate_order("factors rows"), tf.device("CPU:0"):
        counts = launcher.gather(tf.stack(rows))
        return tf.unstack(tf.reduce_max(tf.reshape(counts, [-1, len(products)]), 0))


def sum_of_outer_products(
    launcher: Launcher,
    replicas: int,
    compressor: compression.SufficientFactors,
    product: OuterProduct,
    most: tf.Tensor,
    shape: tf.TensorShape,
    whole_sum: Callable[[tf.Tensor], tf.Tensor],
    name: str,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Sums a matrix that each replica has as a product.

    Args:
        most: Rows of the replica that has the most, of `most_rows`.
        whole_sum: Function that sums a matrix over replicas, for those with too many rows, and
            returns the sum.
        name: Of the matrix, the same on all replicas.

    Returns:
        The sum; how many bytes this replica has for each of the others; and how many it sends.
    """
    sent = compressor.factor_bytes(shape, tf.cast(tf.shape(product.left)[0], tf.int64))

    def gathered(factor: tf.Tensor, columns: int, side: str) -> tuple[tf.Tensor, int]:
        payload = (tf.ensure_shape(factor, [None, columns]),)
        if compressor.inner is not None:
            payload = compressor.inner.encode_rows(*payload, step=None)
        words = compression.pack(payload, tf.shape(factor)[0])
        with launcher.separate_order(f"{name} {side}"):
            words = launcher.gather_padded(words, most)
        factors = compression.unpack(words, payload, tf.shape(words)[0])
        return tf.reshape(tf.cast(factors[0], tf.float32), [-1, columns]), words.shape[1]

    def of_factors() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        left, left_words = gathered(product.left, shape[0], "left")
        right, right_words = gathered(product.right, shape[1], "right")
        padded = sum(padded_size(most * words) for words in (left_words, right_words))
        wire = 4 * (replicas - 1) * tf.cast(padded, tf.int64)
        return tf.matmul(left, right, transpose_a=True), sent, wire

    def of_wholes() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        whole = compressor.wire_bytes(shape, tf.float32)
        wire = round(2 * (replicas - 1) * whole / replicas)
        with launcher.separate_order(f"{name} whole"):
            total = whole_sum(product.whole())
        return total, tf.constant(whole, tf.int64), tf.constant(wire, tf.int64)

    total, *counted = tf.cond(most <= compressor.most_rows(shape, replicas), of_factors, of_wholes)
    return tf.ensure_shape(total, shape), *counted
