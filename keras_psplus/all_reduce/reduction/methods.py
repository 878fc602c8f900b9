"""Methods by which replicas sum dense gradients, one for each kind of compressor.

Payloads whose mean is the payload of the mean are summed by all-reduce. If a compressor can encode
pieces, each replica sums one piece, and sends its sum compressed once more. Other payloads are
gathered. All methods use TensorFlow's collectives, and the computation afterwards is the same on
all replicas, so the results are too, bit for bit.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from keras_psplus import compression
from keras_psplus.all_reduce.collectives.hop import (
    Coding,
    Hop,
    HopOrder,
    Joined,
    after,
    pieces,
)
from keras_psplus.all_reduce.collectives.instance_keys import padded_size
from keras_psplus.compression import Compressor, ErrorFeedback
from keras_psplus.compression.methods import IDENTITY, each, missing, without_feedback
from keras_psplus.compression.wire import add_rows, encode
from keras_psplus.core.batch.replica_step import TensorTraffic

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher
    from keras_psplus.all_reduce.reduction.replica_states import ReplicaStates
    from keras_psplus.compression.outer_products import OuterProduct
    from keras_psplus.core.graph.stand_ins import Gradient

# Gradients compressed more than 8x share buckets that hold 8x more uncompressed bytes.
_STRONG_COMPRESSION = 8


class Dense(NamedTuple):
    """A dense gradient that is to be summed.

    Attributes:
        number: Number of its variable, the same in each step.
    """

    tensor: tf.Tensor
    path: str
    number: int
    method: Method

    @property
    def bytes(self) -> int:
        size: int = self.tensor.shape.num_elements() * self.tensor.dtype.size
        return size

    @property
    def payload_bytes(self) -> int:
        compressor = self.method.compressor or IDENTITY
        return compressor.wire_bytes(self.tensor.shape, self.tensor.dtype)

    @property
    def weight(self) -> int:
        """Bytes that it counts for in a bucket."""
        whole = self.bytes
        is_strong = whole and self.payload_bytes * _STRONG_COMPRESSION < whole
        return whole // _STRONG_COMPRESSION if is_strong else whole

    def cost(self, sent: Any, wire: Any) -> TensorTraffic:
        return cost_of(self.path, self.method.compressor, self.bytes, sent, wire)


class Summing(NamedTuple):
    """Circumstances of the sums of one step on one hop.

    Attributes:
        order: That of sums of tensors as they are.
        most_rows: As of `Factors.most_rows`.
    """

    hop: Hop
    states: ReplicaStates
    bucket_bytes: int
    step: tf.Tensor
    order: HopOrder
    most_rows: dict[int, tf.Tensor]

    def read(self, method: str, bucket: Sequence[Dense]) -> tuple[list[str], list[Any]]:
        """Names and values of the states of a bucket's compressors.

        What one method, or number of replicas, leaves out another cannot use.
        """
        names = [f"{method} {one.number} of {self.hop.size}" for one in bucket]
        inits = (
            functools.partial(one.method.compressor.init, one.tensor.shape, one.tensor.dtype)
            for one in bucket
        )
        return names, [self.states.read(*pair) for pair in zip(names, inits)]

    def ring_cost(self, one: Dense) -> TensorTraffic:
        """Cost of a gradient whose payload is added up on its way."""
        return one.cost(one.payload_bytes, self.hop.ring_bytes(one.payload_bytes))


class Sums(NamedTuple):
    """Sums of a bucket, their costs, and what was sent, if encoded."""

    totals: Sequence[tf.Tensor]
    costs: Sequence[TensorTraffic]
    sent: Sequence[tf.Tensor] = ()


class Method:
    """Way of a gradient to its sum.

    Attributes:
        key: What those have in common that share buckets.
    """

    def __init__(self, compressor: Any = None, *together: Any) -> None:
        self.compressor, self.key = compressor, (type(self).__name__, *together)

    @classmethod
    def sum(cls, summing: Summing, bucket: Sequence[Dense]) -> Sums:
        raise NotImplementedError


class Plain(Method):
    """Tensors of one dtype, added up as they are."""

    @classmethod
    def sum(cls, summing: Summing, bucket: Sequence[Dense]) -> Sums:
        with summing.order.waiting():
            totals = summing.hop.sum(_tensors(bucket))
        return Sums(totals, [summing.ring_cost(one) for one in bucket])


class Alone(Method):
    """Each replica's own estimate, of which nothing is sent."""

    @classmethod
    def sum(cls, summing: Summing, bucket: Sequence[Dense]) -> Sums:
        totals = [_estimate(one.tensor, summing.hop.size) for one in bucket]
        return Sums(totals, [one.cost(0, 0) for one in bucket])


class Linear(Method):
    """Payloads of stateless, linear compressors, added up."""

    @classmethod
    def sum(cls, summing: Summing, bucket: Sequence[Dense]) -> Sums:
        compressors = [one.method.compressor for one in bucket]
        totals = sum_of_linear(summing.hop, compressors, _tensors(bucket), summing.step)
        return Sums(totals, [summing.ring_cost(one) for one in bucket])


class Mean(Method):
    """Payloads whose mean is the payload of the mean."""

    @classmethod
    def sum(cls, summing: Summing, bucket: Sequence[Dense]) -> Sums:
        hop, step = summing.hop, summing.step
        names, states = summing.read("mean", bucket)
        pairs = [cls._estimate(one, hop.size) for one in bucket]
        compressors, tensors = map(list, zip(*pairs))

        def all_mean(payloads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            # Divided first: sums of float16 could overflow.
            return hop.sum([payload / tf.cast(hop.size, payload.dtype) for payload in payloads])

        means, _, states = compression.exchange_means(compressors, tensors, states, step, all_mean)
        for i, (name, state) in enumerate(zip(names, states)):
            written = summing.states.write(name, state)
            if product_of(*pairs[i]) is None:
                # By then the mean has been read to make the state, and the optimizer, now the last
                # to read it, can work in its memory: with PowerSGD, 4 % of a perceptron's step.
                means[i] = after(written, means[i])
        return Sums(means, [cls._cost(one, summing) for one in bucket])

    @staticmethod
    def _estimate(one: Dense, replicas: int) -> tuple[Compressor, tf.Tensor]:
        """Compressor, and the estimate for it; or what it multiplies itself."""
        compressor = one.method.compressor
        if isinstance(compressor, ErrorFeedback) and not compressor.start_step:
            return compressor.times(replicas), one.tensor
        return compressor, _estimate(one.tensor, replicas)

    @staticmethod
    def _cost(one: Dense, summing: Summing) -> TensorTraffic:
        if not one.method.compressor.start_step:
            return summing.ring_cost(one)
        early, ring = summing.step < one.method.compressor.start_step, summing.hop.ring_bytes
        both = [tf.constant(size, tf.int64) for size in (one.bytes, one.payload_bytes)]
        wires = [tf.constant(ring(size), tf.int64) for size in (one.bytes, one.payload_bytes)]
        return one.cost(tf.where(early, *both), tf.where(early, *wires))


class Split(Method):
    """Pieces: each replica adds up those of its rank.

    This is a reduce-scatter by an all-to-all of compressed pieces, and an all-gather of the sums,
    compressed again (Alistarh et al., QSGD; Tang et al., 1-bit Adam, with error feedback on both
    sides).
    """

    @classmethod
    def sum(cls, summing: Summing, bucket: Sequence[Dense]) -> Sums:
        hop, tensors = summing.hop, _tensors(bucket)
        compressor = bucket[0].method.compressor
        parts = [tensors]
        if len(tensors) == 1:
            # While one piece is summed, another is on its way (Peng et al., ByteScheduler, 2019).
            multiple = hop.size * compressor.row_multiple
            cut = pieces(tensors[0], summing.bucket_bytes, multiple)
            parts = [[piece] for piece in cut] if len(cut) > 1 else parts
        key = bucket_key(one.number for one in bucket)
        keys = [key, *(f"{key}-{i}" for i in range(1, len(parts)))]
        totals: list[tf.Tensor] = []
        sent: list[tf.Tensor] = []
        wire = 0
        for name, piece in zip(keys, parts):
            piece = [after(sent, tensor) for tensor in piece]
            layout = Joined(piece, hop.size, compressor.row_multiple)
            there, back = codings(compressor, summing.step, summing.states, f"{name} of {hop.size}")
            totals += layout.wholes(hop.sum_rows(layout.rows(), (there, back)))
            sent = [there.words]
            # One row to each of the others, twice.
            wire += 2 * (hop.size - 1) * compressor.row_bytes((layout.width,), tf.float32)
        if len(parts) > 1:
            totals = [tf.reshape(tf.concat(totals, 0), tensors[0].shape)]
        # Shared out by size.
        elements = [tensor.shape.num_elements() for tensor in tensors]
        wires = [round(wire * n / max(1, sum(elements))) for n in elements]
        costs = [one.cost(one.payload_bytes, own) for one, own in zip(bucket, wires)]
        return Sums(totals, costs, sent)


class Gathered(Method):
    """Payloads of all replicas, added up in rank order."""

    @classmethod
    def sum(cls, summing: Summing, bucket: Sequence[Dense]) -> Sums:
        replicas, step, tensors = summing.hop.size, summing.step, _tensors(bucket)
        compressors = [one.method.compressor for one in bucket]
        names, states = summing.read("gather", bucket)
        payloads = []
        for name, compressor, tensor, state in zip(names, compressors, tensors, states):
            payload, state = encode(compressor, tensor, state, step)
            payloads.append(payload)
            summing.states.write(name, state)
        words = [compression.pack(payload) for payload in payloads]
        sizes = [tf.shape(w)[1] if w.shape[1] is None else w.shape[1] for w in words]
        everything = _gather_words(summing.hop, tf.concat(words, 1), compressors)
        starts = [0, *itertools.accumulate(sizes)]

        sums: list[Any] = [None] * len(tensors)
        at_once = [i for i, c in enumerate(compressors) if c.has_sum_decode]
        for i in at_once:
            rows = everything[:, starts[i] : starts[i + 1]]
            rows = compression.unpack(rows, payloads[i], tf.constant(replicas))
            sums[i] = add_rows(compressors[i], rows, tensors[i].shape, step)
        one_by_one = [i for i in range(len(tensors)) if i not in at_once]

        def add(rank: tf.Tensor, totals: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
            added = []
            for i, total in zip(one_by_one, totals):
                piece = everything[rank, starts[i] : starts[i + 1]]
                own = payloads[i]
                # As it was written: kernels may need what an encoder's shapes say.
                given = zip(compression.unpack(piece[tf.newaxis], own), own)
                payload = tuple(tf.ensure_shape(p, one.shape) for p, one in given)
                added.append(compressors[i].add_to(total, payload, tensors[i].dtype, step))
            return rank + 1, added

        if one_by_one:
            zeros = [tf.zeros(tensors[i].shape) for i in one_by_one]
            _, totals = tf.while_loop(
                lambda rank, _: rank < replicas, add, (0, zeros), maximum_iterations=replicas
            )
            for i, total in zip(one_by_one, totals):
                sums[i] = total
        costs = []
        for one, payload in zip(bucket, payloads):
            sent = sum(tf.size(p, tf.int64) * p.dtype.size for p in payload)
            costs.append(one.cost(sent, sent * (replicas - 1)))
        totals = [tf.cast(total, tensor.dtype) for total, tensor in zip(sums, tensors)]
        return Sums(totals, costs, payloads[-1])


def _gather_words(hop: Hop, words: tf.Tensor, compressors: Sequence[object]) -> tf.Tensor:
    if words.shape.is_fully_defined():
        return hop.launcher.gather(words)
    # As many on each replica, but not known to the graph: as rows of one word.
    gathered, counts = hop.launcher.gather_rows(tf.reshape(words, [-1, 1]))
    same = tf.reduce_all(counts == counts[0])
    message = (
        "All workers must send payloads of the same length at a step; a length may depend on the "
        f"step, not on the gradient. Received: words from each worker, by {compressors}:"
    )
    with tf.control_dependencies([tf.debugging.Assert(same, [message, counts], summarize=-1)]):
        return tf.reshape(gathered, [hop.size, -1])


class Factors(Method):
    """Products: the factors of all replicas, gathered and multiplied on each.

    The number of rows may differ between replicas and from step to step, and all must choose the
    same way, so they tell each other first, once for all products.
    """

    @staticmethod
    def most_rows(launcher: Launcher, gradients: Sequence[Dense]) -> dict[int, tf.Tensor]:
        """Largest number of rows of each product on any replica, on the host, by number."""
        known = ((one.number, product_of(one.method.compressor, one.tensor)) for one in gradients)
        products = {number: product for number, product in known if product is not None}
        if not products:
            return {}
        # Of what went into layers: this waits for no gradient. On a GPU, shapes are on the host
        # anyway.
        rows = [tf.shape(one.left)[0] for one in products.values()]
        with launcher.separate_order("factors rows"), tf.device("CPU:0"):
            counts = launcher.gather(tf.stack(rows))
            most = tf.reduce_max(tf.reshape(counts, [-1, len(rows)]), 0)
            return dict(zip(products, tf.unstack(most)))

    @classmethod
    def sum(cls, summing: Summing, bucket: Sequence[Dense]) -> Sums:
        (one,), hop, step = bucket, summing.hop, summing.step
        compressor, shape, name = one.method.compressor, one.tensor.shape, f"factors {one.number}"
        product, most = product_of(compressor, one.tensor), summing.most_rows[one.number]
        assert product is not None
        left, right = product.left, product.right
        sent = compressor.factor_bytes(shape, tf.cast(tf.shape(left)[0], tf.int64))

        def of_factors() -> tuple[tf.Tensor, ...]:
            found = [
                cls._gather(hop.launcher, compressor.inner, factor, columns, most, f"{name} {side}")
                for factor, columns, side in ((left, shape[0], "left"), (right, shape[1], "right"))
            ]
            padded = sum(padded_size(most * words) for _, words in found)
            wire = 4 * (hop.size - 1) * tf.cast(padded, tf.int64)
            return tf.matmul(found[0][0], found[1][0], transpose_a=True), sent, wire

        def of_wholes() -> tuple[tf.Tensor, ...]:
            whole, inner = compressor.wire_bytes(shape, tf.float32), compressor.inner
            with hop.launcher.separate_order(f"{name} whole"):
                matrix = product.whole()
                if inner is None:
                    total = hop.launcher.all_reduce(matrix)
                else:
                    (total,) = sum_of_linear(hop, [inner], [matrix], step)
            counted = whole, hop.ring_bytes(whole)
            return total, *(tf.constant(number, tf.int64) for number in counted)

        few = most <= compressor.most_rows(shape, hop.size)
        total, *counted = tf.cond(few, of_factors, of_wholes)
        return Sums([tf.ensure_shape(total, shape)], [one.cost(*counted)])

    @staticmethod
    def _gather(
        launcher: Launcher,
        inner: Compressor | None,
        factor: tf.Tensor,
        columns: int,
        most: tf.Tensor,
        name: str,
    ) -> tuple[tf.Tensor, int]:
        """A factor of all replicas as float32, and the words of one row."""
        payload: tuple[tf.Tensor, ...] = (tf.ensure_shape(factor, [None, columns]),)
        if inner is not None:
            payload = inner.encode_rows(payload[0], step=0)
        words = compression.pack(payload, tf.shape(factor)[0])
        with launcher.separate_order(name):
            words = launcher.gather_padded(words, most)
        factors = compression.unpack(words, payload, tf.shape(words)[0])
        return tf.reshape(tf.cast(factors[0], tf.float32), [-1, columns]), words.shape[1]


def method_of(
    compressor: Compressor | None, shape: tf.TensorShape, dtype: tf.DType, number: int
) -> Method:
    """The method that sums such a gradient, whose number no other one has."""
    if not shape.num_elements():
        # There are no collectives of nothing.
        return Alone(compressor)
    if compressor is None:
        return Plain(None, dtype)
    if not compressor.communicates:
        return Alone(compressor)
    if compressor.gathers_factors:
        # Factors are short, and those of one layer long before those of the next.
        return Factors(compressor, number)
    if compressor.reducible:
        return Linear(compressor) if compressor.is_linear else Mean(compressor)
    if compressor.supports_reduce_scatter:
        feedback = compressor if isinstance(compressor, ErrorFeedback) else None
        options = (feedback.momentum, feedback.factor_masking) if feedback else ()
        return Split(compressor, id(without_feedback(compressor)), options)
    return Gathered(compressor)


def codings(
    compressor: Compressor, step: tf.Tensor, states: ReplicaStates, name: str
) -> tuple[Coding, Coding]:
    """Codings of rows that are to be summed, and of their sums."""
    inner = without_feedback(compressor)
    back = inner if inner is compressor else ErrorFeedback(inner)
    return (
        Coding(compressor, step, states, f"scatter {name}"),
        Coding(back, step, states, f"gather {name}"),
    )


def bucket_key(numbers: Iterable[int]) -> str:
    """Short name of a bucket, by the numbers of its variables."""
    return f"{zlib.crc32(repr(list(numbers)).encode()):08x}"


def sum_of_linear(
    hop: Hop, compressors: Sequence[Compressor], tensors: Sequence[tf.Tensor], step: tf.Tensor
) -> list[tf.Tensor]:
    """Sums tensors by adding up payloads of stateless, linear compressors."""
    payloads = [c.encode(tensor, (), step)[0] for c, tensor in zip(compressors, tensors)]
    sums = tf.nest.pack_sequence_as(payloads, hop.sum(tf.nest.flatten(payloads)))
    return [c.decode(s, t.shape, t.dtype, step) for c, s, t in zip(compressors, sums, tensors)]


def gather_slices(
    launcher: Launcher, compressor: Compressor, slices: tf.IndexedSlices, step: tf.Tensor
) -> tuple[tf.IndexedSlices, tf.Tensor, tf.Tensor]:
    """Concatenates the slices of all replicas in rank order, values compressed row by row.

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


def product_of(compressor: Compressor | None, gradient: Gradient) -> OuterProduct | None:
    """The `OuterProduct` of a gradient that need not be materialized, or None."""
    if compressor is None or not compressor.accepts_factored or compressor.start_step:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return None
    return compressor.factored(gradient)


def cost_of(
    path: str, compressor: Compressor | None, logical: Any, sent: Any, wire: Any, between: Any = 0
) -> TensorTraffic:
    name = None if compressor is None or compressor is IDENTITY else repr(compressor)
    return TensorTraffic(path, name, logical, sent, wire, between)


def _tensors(bucket: Sequence[Dense]) -> list[tf.Tensor]:
    return [one.tensor for one in bucket]


def _estimate(tensor: tf.Tensor, replicas: int) -> tf.Tensor:
    """A replica's own estimate of the whole gradient: the mean of these is the sum."""
    return tensor * tf.cast(replicas, tensor.dtype)


# Compressors that gradients can be all-reduced with.

_METHODS = ("encode", "decode", "wire_bytes", "exchange")


def compressor_of(identifier: Any) -> Compressor | None:
    """Makes a strategy's compressor, with error feedback if it asks for it."""
    compressor = compression.with_error_feedback(compression.get(identifier))
    for one in each(compressor):
        # One that has nothing but a choice of its own chooses among others, checked when it does.
        has_none = all(missing(one, method) for method in _METHODS)
        if not has_none or missing(one, "for_variable"):
            check_compressor(one)
    return compressor


def check_rows(compressor: Compressor, gathers: bool = False) -> Compressor:
    """A compressor that can encode rows; those of values if it `gathers`."""
    inner = without_feedback(compressor)
    fits = compressor.supports_reduce_scatter and compressor.communicates
    if not (fits and (inner.supports_values or not gathers)):
        what, signs = ("weights", "") if gathers else ("gradients", ', "sign"')
        raise ValueError(
            f'with `shard`, {what} can be sent by "bf16", "fp16", "int8"{signs}, or a compressor '
            "that `supports_reduce_scatter`, and for weights also `supports_values`: each worker "
            f"has one piece. Received: compression={compressor!r} for {what}"
        )
    return compressor


def check_compressor(compressor: Compressor) -> None:
    """Raises ValueError if a compressor lacks a method that all-reduce calls."""
    if compressor.gathers_factors:
        return
    needed = ["wire_bytes"]
    # Payloads of linear ones are added up without `exchange`.
    by_exchange = compressor.reducible and not compressor.is_linear
    by_exchange = by_exchange and not missing(compressor, "exchange")
    if compressor.communicates and not by_exchange:
        needed = ["encode", "decode", *needed]
    method = missing(compressor, *needed)
    if method:
        raise ValueError(
            "`compression` must have `encode`, `decode` and `wire_bytes`, or, if it is `reducible` "
            "and not `is_linear`, `exchange` and `wire_bytes`. "
            f"Received: compression={compressor!r}, without `{method}`"
        )
