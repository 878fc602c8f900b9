"""Sums one replica's gradients over all replicas, each by the compressor that its variable has.

One collective for all gradients cannot start before the last of them is ready, and one for each is
dominated by latency. Buckets are filled from the last layer back, the order in which backprop
makes gradients ready, so that the first bucket travels while the rest is computed (Li et al.,
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, section 3.2).
"""

import contextlib
import functools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from keras_psplus import compression
from keras_psplus.all_reduce.collectives import gradients
from keras_psplus.all_reduce.collectives.operations import Launcher
from keras_psplus.all_reduce.collectives.size_classes import padded_size
from keras_psplus.all_reduce.reduction import compressors as route_choice
from keras_psplus.all_reduce.reduction import routes
from keras_psplus.all_reduce.reduction.compressors import IDENTITY, check_compressor
from keras_psplus.all_reduce.reduction.replica_states import ReplicaStates
from keras_psplus.compression import Compressor
from keras_psplus.compression.outer_products import OuterProduct
from keras_psplus.core.batch.duplicate_rows import Join, Joins
from keras_psplus.core.batch.replica_step import TensorTraffic, TrafficVariables
from keras_psplus.core.graph.stand_ins import Gradient
from keras_psplus.updates.base import numbers_of

_Grads: TypeAlias = Sequence[Gradient]
_Sums: TypeAlias = tuple[list[Any], list[TensorTraffic]]


class CompressedSum:
    """Sums the gradients of one optimizer on one replica.

    Args:
        compressor: `Compressor`, with error feedback where it is wanted, or None.
        bucket_bytes: Size at which a bucket is sent, in bytes of uncompressed gradients.
        timed: Whether to measure for how long gradients are waited for.
        states: `ReplicaStates` for what compressors keep; by default, nobody else has them.
    """

    def __init__(
        self,
        launcher: Launcher,
        rank: int,
        replicas: int,
        compressor: compression.Compressor | None,
        bucket_bytes: int,
        timed: bool = True,
        states: ReplicaStates | None = None,
    ) -> None:
        self._launcher, self._rank, self._replicas = launcher, rank, replicas
        self._compressor, self._bucket_bytes, self._timed = compressor, bucket_bytes, timed
        self.states = states or ReplicaStates(launcher._device)
        self.traffic_variables = TrafficVariables()
        self._numbers: dict[int, tuple[int, Any]] = {}

    def __call__(
        self, grads: _Grads, variables: Sequence[Any], step: tf.Tensor, joins: Joins = ()
    ) -> list[Gradient]:
        """Sums gradients.

        Args:
            grads: List of tensors of static shape, or `tf.IndexedSlices`. The same on every
                replica but for the values and, in slices, the number of rows.
            variables: Their variables, with a `path` and a `shape`.
            step: int64 scalar, the same on all replicas.
            joins: `duplicate_rows.whole_of` each gradient; by default, all rows stay as they are.

        Returns:
            List of sums, bit-identical on all replicas. Slices come back with the rows of all
            replicas, in rank order.
        """
        summed, entries = self.sum_and_count(grads, variables, step, joins)
        self.traffic_variables.add(entries)
        if self._timed:
            pairs = zip(variables, grads)
            products = [_product(self.compressor_of(v, g), g) or g for v, g in pairs]
            self.traffic_variables.time(tf.nest.flatten(numbers_of(products)), numbers_of(summed))
        return summed

    def sum_and_count(
        self, grads: _Grads, variables: Sequence[Any], step: tf.Tensor, joins: Joins = ()
    ) -> tuple[list[Gradient], list[TensorTraffic]]:
        """Sums gradients, and says what it has cost instead of adding that to the totals."""
        paths = [variable.path for variable in variables]
        numbers = [self._number(variable) for variable in variables]
        compressors = [self.compressor_of(v, g) for v, g in zip(variables, grads)]
        summed = list(grads)
        entries: list[Any] = [None] * len(grads)
        dense = [i for i, g in enumerate(grads) if not isinstance(g, tf.IndexedSlices)]
        sent, order = list[tf.Tensor](), gradients.HopOrder()
        # Of forms: a route is chosen without the gradient.
        forms = {i: (compressors[i], grads[i].shape, grads[i].dtype) for i in dense}
        alone = {i: route_choice.route(*forms[i], i) for i in dense}
        averages = ("mean",) in alone.values()
        factored = [i for i in dense if alone[i][0] == "factors"]
        most_rows = self._most_rows([(numbers[i], compressors[i], grads[i]) for i in factored])
        for (route, *_), places in gradients.buckets(
            # From the last layer back, as backprop makes them ready.
            list(reversed(dense)),
            lambda i: route_choice.route(*forms[i], i, averages),
            lambda i: route_choice.weight(*forms[i]),
            self._bucket_bytes,
        ):
            sequences: tuple[Sequence[Any], ...] = grads, compressors, paths, numbers
            bucket = routes.Bucket(*([sequence[i] for i in places] for sequence in sequences))
            # Processors that encode this one before the last is on its way leave the link idle.
            bucket = bucket._replace(tensors=[gradients.after(sent, t) for t in bucket.tensors])
            options = {"most_rows": most_rows} if route == "factors" else {}
            with order.waiting() if route == "sum" else contextlib.nullcontext():
                totals, counted, *own = getattr(self, f"_{route}")(bucket, step, **options)
            sent = own or sent
            order.end([totals[-1]])
            for i, total, entry in zip(places, totals, counted, strict=True):
                summed[i], entries[i] = total, entry
        for i in set(range(len(grads))) - set(dense):
            join = joins[i] if joins else None
            summed[i], entries[i] = self._slices(grads[i], compressors[i], paths[i], step, join)
        return summed, entries

    def compressor_of(self, variable: Any, gradient: Gradient) -> compression.Compressor | None:
        if self._compressor is None:
            return None
        chosen: Any = self._compressor.for_variable(variable.path, variable.shape, gradient.dtype)
        if chosen is not None:
            # It may be one that `for_variable` has made just now.
            check_compressor(chosen)
            if chosen.gathers_factors and not _product(chosen, gradient):
                return chosen.inner
        return chosen

    # Each route returns sums, what they have cost, and what has been sent if it took long to make.

    def _sum(self, bucket: routes.Bucket, step: tf.Tensor) -> _Sums:
        sizes = zip(bucket.paths, map(_bytes, bucket.tensors))
        entries = [TensorTraffic(path, None, n, n, self._by_ring(n)) for path, n in sizes]
        return gradients.pack_and_sum(self._launcher, bucket.tensors), entries

    def _total(self, bucket: routes.Bucket, step: tf.Tensor) -> _Sums:
        tensors, compressors, paths, _ = bucket
        entries = []
        for path, compressor, tensor in zip(paths, compressors, tensors):
            sent = compressor.wire_bytes(tensor.shape, tensor.dtype)
            wire = self._by_ring(sent)
            entries.append(TensorTraffic(path, _name(compressor), _bytes(tensor), sent, wire))
        return routes.total(self._launcher, compressors, tensors, step), entries

    def _mean(self, bucket: routes.Bucket, step: tf.Tensor) -> _Sums:
        tensors, paths = bucket.tensors, bucket.paths
        compressors = [c or IDENTITY for c in bucket.compressors]
        names = self._names("mean", bucket.numbers)
        states = [self._state(n, c, t) for n, c, t in zip(names, compressors, tensors)]
        users, estimates = self._estimates(compressors, tensors)
        means, states = routes.mean(self._launcher, self._replicas, users, estimates, states, step)
        for i, (name, state) in enumerate(zip(names, states)):
            written = self.states.write(name, state)
            if _product(users[i], estimates[i]) is None:
                # What made the state has read the mean by then, and the optimizer, now the last to
                # do so, can work in the mean's memory: with PowerSGD, 4 % of a perceptron's step.
                means[i] = gradients.after(written, means[i])
        entries = []
        for path, compressor, tensor in zip(paths, compressors, tensors):
            whole, sent = _bytes(tensor), compressor.wire_bytes(tensor.shape, tensor.dtype)
            wire = self._by_ring(sent)
            if compressor.start_step:
                early = step < compressor.start_step
                sent = tf.where(early, *map(_int64, (whole, sent)))
                wire = tf.where(early, *map(_int64, (self._by_ring(whole), wire)))
            entries.append(TensorTraffic(path, _name(compressor), whole, sent, wire))
        return means, entries

    def _split(self, bucket: routes.Bucket, step: tf.Tensor) -> tuple[Any, ...]:
        tensors, compressors, paths, numbers = bucket
        compressor, key = compressors[0], f"{zlib.crc32(repr(numbers).encode()):08x}"
        pieces = [tensors]
        if len(tensors) == 1:
            # While one piece is summed, another is on its way (Peng et al., ByteScheduler, 2019).
            multiple = self._replicas * compressor.row_multiple
            cut = gradients.pieces(tensors[0], self._bucket_bytes, multiple)
            pieces = [[piece] for piece in cut] if len(cut) > 1 else pieces
        keys = [key, *(f"{key}-{i}" for i in range(1, len(pieces)))]
        totals: list[list[tf.Tensor]] = []
        sent: list[tf.Tensor] = []
        wire = 0
        for name, piece in zip(self._names("split", keys), pieces):
            piece = [gradients.after(sent, tensor) for tensor in piece]
            first = functools.partial(routes.split_init, self._replicas, compressor, piece)
            state = self.states.read(name, first)
            total, state, words = routes.split(
                self._launcher, self._rank, self._replicas, compressor, piece, state, step
            )
            self.states.write(name, state)
            totals, sent = [*totals, total], [words]
            # One row to each of the others, twice.
            _, width = routes.rows_for(self._replicas, compressor, piece)
            wire += 2 * (self._replicas - 1) * compressor.row_bytes((width,), tf.float32)
        sums = totals[0]
        if len(pieces) > 1:
            sums = [tf.reshape(tf.concat(sum(totals, []), 0), tensors[0].shape)]
        elements = [tensor.shape.num_elements() for tensor in tensors]
        entries = [
            TensorTraffic(
                path,
                _name(compressor),
                _bytes(tensor),
                compressor.wire_bytes(tensor.shape, tensor.dtype),
                # Shared out by size.
                round(wire * n / max(1, sum(elements))),
            )
            for path, tensor, n in zip(paths, tensors, elements)
        ]
        return sums, entries, *sent

    def _gather(self, bucket: routes.Bucket, step: tf.Tensor) -> tuple[Any, ...]:
        tensors, compressors, paths, numbers = bucket
        names = self._names("gather", numbers)
        states = [self._state(n, c, t) for n, c, t in zip(names, compressors, tensors)]
        sums, states, payloads = routes.gather(
            self._launcher, self._replicas, compressors, tensors, states, step
        )
        entries = []
        for name, state in zip(names, states):
            self.states.write(name, state)
        for path, compressor, tensor, payload in zip(paths, compressors, tensors, payloads):
            sent = sum(tf.size(p, tf.int64) * p.dtype.size for p in payload)
            wire = sent * (self._replicas - 1)
            entries.append(TensorTraffic(path, _name(compressor), _bytes(tensor), sent, wire))
        return sums, entries, *payloads[-1]

    def _most_rows(self, grads: list[tuple[int, Any, tf.Tensor]]) -> dict[int, tf.Tensor]:
        """`factor_sums.most_rows` of gradients that travel as factors, by numbers of variables."""
        known = ((n, _product(c, g)) for n, c, g in grads)
        products = {number: product for number, product in known if product is not None}
        if not products:
            return {}
        return dict(zip(products, routes.most_rows(self._launcher, list(products.values()))))

    def _factors(
        self, bucket: routes.Bucket, step: tf.Tensor, most_rows: dict[int, tf.Tensor]
    ) -> _Sums:
        (tensor,), (compressor,), (path,), (number,) = bucket
        product = _product(compressor, tensor)
        assert product is not None

        def whole_sum(matrix: tf.Tensor) -> tf.Tensor:
            if compressor.inner is None:
                return self._launcher.all_reduce(matrix)
            return routes.total(self._launcher, [compressor.inner], [matrix], step)[0]

        total, sent, wire = routes.sum_of_outer_products(
            *(self._launcher, self._replicas, compressor, product, most_rows[number]),
            *(tensor.shape, whole_sum, f"factors {number}"),
        )
        return [total], [TensorTraffic(path, _name(compressor), _bytes(tensor), sent, wire)]

    def _own(self, bucket: routes.Bucket, step: tf.Tensor) -> _Sums:
        own = zip(bucket.paths, bucket.compressors, bucket.tensors)
        entries = [TensorTraffic(p, _name(c), _bytes(t), 0, 0) for p, c, t in own]
        return [self._estimate(tensor) for tensor in bucket.tensors], entries

    def _slices(
        self,
        slices: tf.IndexedSlices,
        compressor: Compressor | None,
        path: str,
        step: tf.Tensor,
        join: Join | None,
    ) -> tuple[tf.IndexedSlices, TensorTraffic]:
        rows = tf.shape(slices.indices, tf.int64)[0]
        row = slices.values.shape[1:].num_elements() * slices.dtype.size
        logical = rows * (row + slices.indices.dtype.size)
        scale = tf.cast(self._replicas, slices.dtype)
        if compressor is not None and not compressor.communicates:
            own = tf.IndexedSlices(slices.values * scale, slices.indices, slices.dense_shape)
            return own, TensorTraffic(path, _name(compressor), logical, 0, 0)
        if compressor is not None and not compressor.compresses_rows:
            compressor = None
        used = compressor or IDENTITY
        gathered, words, counts = routes.gather_rows(self._launcher, used, slices, step)
        gathered = gathered if join is None else join(gathered, counts)
        word_bytes = 4 * tf.cast(tf.shape(words)[1], tf.int64)
        # All replicas send as many as the one with the most rows, rounded up to a class.
        padded = padded_size(tf.reduce_max(counts) * tf.shape(words)[1])
        wire = 4 * (self._replicas - 1) * tf.cast(padded, tf.int64)
        return gathered, TensorTraffic(path, _name(compressor), logical, rows * word_bytes, wire)

    def _state(self, name: str, compressor: Compressor, tensor: tf.Tensor) -> Any:
        return self.states.read(name, lambda: compressor.init(tensor.shape, tensor.dtype))

    def _number(self, variable: Any) -> int:
        """A variable's number in checkpoints: paths differ from model to model, or are the same."""
        # With the variable, or another could get its id.
        return self._numbers.setdefault(id(variable), (len(self._numbers), variable))[0]

    def _names(self, route: str, numbers: Iterable[Any]) -> list[str]:
        """Names of states: what one route, or number of replicas, leaves out another cannot use."""
        return [f"{route} {number} of {self._replicas}" for number in numbers]

    def _estimate(self, tensor: tf.Tensor) -> tf.Tensor:
        """This replica's own estimate of the whole gradient: the mean of these is the sum."""
        return tensor * tf.cast(self._replicas, tensor.dtype)

    def _estimates(self, compressors: list[Any], tensors: list[tf.Tensor]) -> Iterator[list[Any]]:
        """Compressors, and the estimates for them; or what they multiply themselves."""
        pairs = [
            (compressor.times(self._replicas), tensor)
            if isinstance(compressor, compression.ErrorFeedback) and not compressor.start_step
            else (compressor, self._estimate(tensor))
            for compressor, tensor in zip(compressors, tensors)
        ]
        return map(list, zip(*pairs))

    def _by_ring(self, payload_bytes: int) -> int:
        return round(2 * (self._replicas - 1) * payload_bytes / self._replicas)


def _name(compressor: Compressor | None) -> str | None:
    return None if compressor is None or compressor is IDENTITY else repr(compressor)


def _bytes(tensor: tf.Tensor) -> int:
    return tensor.shape.num_elements() * tensor.dtype.size


def _int64(number: int) -> tf.Tensor:
    return tf.constant(number, tf.int64)


def _product(compressor: Compressor | None, gradient: Gradient) -> OuterProduct | None:
    """The `OuterProduct` of a gradient that need not be materialized, or None."""
    if compressor is None or not compressor.accepts_factored or compressor.start_step:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return None
    return compressor.factored(gradient)
