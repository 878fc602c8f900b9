"""Sums of gradients over all replicas: one for each optimizer and local replica.

Each gradient is summed by the compressor that its variable has. One collective for all gradients
cannot start before the last of them is ready, and one for each is dominated by latency. Buckets are
filled from the last layer back, the order in which backprop makes gradients ready, so that the
first bucket travels while the rest is computed (Li et al., "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training", VLDB 2020, section 3.2).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import tensorflow as tf

from keras_psplus.all_reduce.collectives.hop import (
    Cut,
    Hop,
    HopOrder,
    after,
    buckets,
    pieces,
    row_of,
    rows_of,
    shards_of,
    wholes_of,
)
from keras_psplus.all_reduce.collectives.instance_keys import padded_size
from keras_psplus.all_reduce.reduction.methods import (
    Dense,
    Factors,
    Mean,
    Plain,
    Summing,
    bucket_key,
    check_compressor,
    codings,
    cost_of,
    gather_slices,
    method_of,
    product_of,
)
from keras_psplus.all_reduce.reduction.replica_states import ReplicaStates
from keras_psplus.all_reduce.topology.group_topology import Hops
from keras_psplus.communication import Communication
from keras_psplus.compression import methods
from keras_psplus.compression.methods import IDENTITY
from keras_psplus.core.batch import duplicate_rows
from keras_psplus.core.batch.replica_step import TensorTraffic, TrafficVariables
from keras_psplus.core.graph.variables import gradient_shape
from keras_psplus.tf_internals import distribute_utils
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.updates.base import numbers_of

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher
    from keras_psplus.all_reduce.reduction.replica_states import MirroredState
    from keras_psplus.all_reduce.topology.group_topology import Levels
    from keras_psplus.compression import Compressor
    from keras_psplus.core.batch.duplicate_rows import Join, Joins
    from keras_psplus.core.graph.stand_ins import Gradient
    from keras_psplus.engine import Engine

_Grads: TypeAlias = "Sequence[Gradient]"
_Sums: TypeAlias = tuple[list[Any], list[TensorTraffic]]


class GradientSum:
    """Sums the gradients of one optimizer on one replica.

    Args:
        bucket_bytes: Size at which a bucket is sent, in bytes of uncompressed gradients.
    """

    def __init__(self, bucket_bytes: int, timed: bool, states: ReplicaStates) -> None:
        self.states, self._bucket_bytes, self._timed = states, bucket_bytes, timed
        self.traffic_variables = TrafficVariables()

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
        summed, costs = self.sum_and_count(grads, variables, step, joins)
        self.traffic_variables.add(costs)
        return summed

    def sum_and_count(
        self, grads: _Grads, variables: Sequence[Any], step: tf.Tensor, joins: Joins = ()
    ) -> _Sums:
        """Sums gradients, and says what it has cost instead of adding that to the totals."""
        raise NotImplementedError

    def _time(self, made: Sequence[Any], summed: Sequence[Any]) -> None:
        """Measures for how long sums are waited for once what they need is made."""
        self.traffic_variables.time(tf.nest.flatten(numbers_of(made)), numbers_of(summed))


class RingSum(GradientSum):
    """Sum over the replicas of one hop."""

    def __init__(
        self,
        hop: Hop,
        compressor: Compressor | None,
        bucket_bytes: int,
        timed: bool = True,
        states: ReplicaStates | None = None,
    ) -> None:
        super().__init__(bucket_bytes, timed, states or ReplicaStates(hop.launcher._device))
        self._hop, self._compressor = hop, compressor

    def sum_and_count(
        self, grads: _Grads, variables: Sequence[Any], step: tf.Tensor, joins: Joins = ()
    ) -> _Sums:
        numbers = [self.states.number(variable) for variable in variables]
        compressors = [self.compressor_of(v, g) for v, g in zip(variables, grads)]
        summed: list[Any] = list(grads)
        costs: list[Any] = [None] * len(grads)
        dense = {
            i: Dense(g, variables[i].path, numbers[i], method_of(c, g.shape, g.dtype, i))
            for i, (g, c) in enumerate(zip(grads, compressors))
            if not isinstance(g, tf.IndexedSlices)
        }
        if any(type(one.method) is Mean for one in dense.values()):
            for i, one in dense.items():
                if type(one.method) is Plain and one.tensor.dtype.is_floating:
                    # With others that are added up on their way it costs no message of its own.
                    dense[i] = one._replace(method=Mean(IDENTITY))
        factored = [one for one in dense.values() if type(one.method) is Factors]
        most_rows = Factors.most_rows(self._hop.launcher, factored)
        summing = Summing(self._hop, self.states, self._bucket_bytes, step, HopOrder(), most_rows)
        sent: Sequence[tf.Tensor] = []
        for _, places in buckets(
            # From the last layer back, as backprop makes them ready.
            reversed(dense),
            lambda i: dense[i].method.key,
            lambda i: dense[i].weight,
            self._bucket_bytes,
        ):
            # Processors that encode this one before the last is on its way leave the link idle.
            bucket = [dense[i]._replace(tensor=after(sent, dense[i].tensor)) for i in places]
            sums = bucket[0].method.sum(summing, bucket)
            sent = sums.sent or sent
            summing.order.end([sums.totals[-1]])
            for i, total, cost in zip(places, sums.totals, sums.costs, strict=True):
                summed[i], costs[i] = total, cost
        for i in set(range(len(grads))).difference(dense):
            join = joins[i] if joins else None
            summed[i], costs[i] = self._slices(
                grads[i], compressors[i], variables[i].path, step, join
            )
        if self._timed:
            self._time([product_of(c, g) or g for c, g in zip(compressors, grads)], summed)
        return summed, costs

    def compressor_of(self, variable: Any, gradient: Gradient) -> Compressor | None:
        if self._compressor is None:
            return None
        chosen: Any = self._compressor.for_variable(variable.path, variable.shape, gradient.dtype)
        if chosen is not None:
            # It may be one that `for_variable` has made just now.
            check_compressor(chosen)
            if chosen.gathers_factors and not product_of(chosen, gradient):
                return chosen.inner
        return chosen

    def _slices(
        self,
        slices: tf.IndexedSlices,
        compressor: Compressor | None,
        path: str,
        step: tf.Tensor,
        join: Join | None,
    ) -> tuple[tf.IndexedSlices, TensorTraffic]:
        replicas = self._hop.size
        rows = tf.shape(slices.indices, tf.int64)[0]
        row = slices.values.shape[1:].num_elements() * slices.dtype.size
        logical = rows * (row + slices.indices.dtype.size)
        if compressor is not None and not compressor.communicates:
            scaled = slices.values * tf.cast(replicas, slices.dtype)
            own = tf.IndexedSlices(scaled, slices.indices, slices.dense_shape)
            return own, cost_of(path, compressor, logical, 0, 0)
        if compressor is not None and not compressor.compresses_rows:
            compressor = None
        used = compressor or IDENTITY
        gathered, words, counts = gather_slices(self._hop.launcher, used, slices, step)
        gathered = gathered if join is None else join(gathered, counts)
        sent = rows * (4 * tf.cast(tf.shape(words)[1], tf.int64))
        # All replicas send as many as the one with the most rows, rounded up to a class.
        padded = padded_size(tf.reduce_max(counts) * tf.shape(words)[1])
        wire = 4 * (replicas - 1) * tf.cast(padded, tf.int64)
        return gathered, cost_of(path, compressor, logical, sent, wire)


# Two-level all-reduce of one replica's gradients: inside groups, and between them.
#
# Links inside a rack or a host are fast, and shared by few. The slow links carry each gradient once
# for each group, and not once for each worker (Jia et al., "Highly Scalable Deep Learning Training
# System with Mixed-Precision", 2018; Goyal et al., "Accurate, Large Minibatch SGD", 2017, section
# 4). Here are two groups of two replicas, and gradients of two shards:
#
#             group 0                             group 1
#        r0           r1                     r2           r3
#     1. [a0 a1]  <-> [b0 b1]                [c0 c1]  <-> [d0 d1]     reduce-scatter inside
#     2. [a0+b0]      [a1+b1]   <- between -> [c0+d0]     [c1+d1]     all-reduce of equal shards
#     3. [s0]     <-> [s1]                   [s0]     <-> [s1]        all-gather inside
#        [s0 s1]      [s0 s1]                [s0 s1]      [s0 s1]
#
# While one bucket is between groups, the next is inside: a `HopOrder` for each orders the sends.


# Buckets that are on a hop at once. All of them at once would share its link and arrive together:
# none would be between groups while others are summed inside, nor be handed on while others are
# between groups.
_INSIDE, _BETWEEN = 1, 2


class _Path(NamedTuple):
    """TensorFlow's variable, or a piece of one, as far as sums have to know it."""

    path: str
    shape: Any


class _Part(NamedTuple):
    """A gradient or a piece of it, with its index and its variable."""

    number: int
    tensor: tf.Tensor
    variable: Any


class TwoLevelSum(GradientSum):
    """Sum over the hops of a topology.

    `tf.IndexedSlices` go along one ring of all replicas, compressed as between groups: what has to
    be gathered is the same for all.
    """

    def __init__(
        self,
        everyone: Hop,
        levels: Levels,
        compressors: Hops,
        bucket_bytes: int,
        timed: bool,
        states: ReplicaStates,
    ) -> None:
        # Small ones, for the hops to overlap.
        super().__init__(max(1, bucket_bytes // 2), timed, states.within("within"))
        self._within, self._compressor = levels.within, compressors.within
        self._next_is_outside = levels.next_is_outside
        self._everyone, self._between = (
            RingSum(hop, compressors.between, bucket_bytes, False, states.within(name))
            for hop, name in ((everyone, "everyone"), (levels.between, "between"))
        )
        self._pieces: dict[int, tuple[Any, list[_Path]]] = {}

    def sum_and_count(
        self, grads: _Grads, variables: Sequence[Any], step: tf.Tensor, joins: Joins = ()
    ) -> _Sums:
        summed: list[Any] = list(grads)
        costs: list[Any] = [None] * len(grads)
        dense = [i for i, g in enumerate(grads) if _is_dense(g)]
        # From the last layer back, as backprop makes them ready.
        parts = [part for i in reversed(dense) for part in self._parts(i, grads[i], variables[i])]
        results: dict[int, list[tuple[tf.Tensor, TensorTraffic]]] = {i: [] for i in dense}
        orders = HopOrder(_INSIDE), HopOrder(_BETWEEN)
        for (_, is_compressed), bucket in buckets(
            parts,
            lambda part: (part.tensor.dtype, self._is_compressed(part)),
            lambda part: part.tensor.shape.num_elements() * part.tensor.dtype.size,
            self._bucket_bytes,
        ):
            compressor = self._compressor if is_compressed else None
            found = self._sum_bucket(bucket, compressor, step, *orders)
            for part, *result in zip(bucket, *found, strict=True):
                results[part.number].append(tuple(result))
        for i, of_pieces in results.items():
            totals, counted = zip(*of_pieces)
            summed[i] = totals[0]
            if len(totals) > 1:
                summed[i] = tf.reshape(tf.concat(totals, 0), grads[i].shape)
            costs[i] = TensorTraffic(*counted[0][:2], *map(sum, zip(*(c[2:6] for c in counted))))
        others = [i for i in range(len(grads)) if i not in dense]
        if others:
            chosen = [grads[i] for i in others], [variables[i] for i in others]
            own = [joins[i] for i in others] if joins else ()
            sums, of_ring = self._everyone.sum_and_count(*chosen, step, own)
            for i, total, cost in zip(others, sums, of_ring, strict=True):
                between = cost.wire if self._next_is_outside else 0
                summed[i], costs[i] = total, cost._replace(between=between)
        if self._timed:
            self._time(grads, summed)
        return summed, costs

    def _parts(self, number: int, gradient: tf.Tensor, variable: Any) -> list[_Part]:
        """Splits a gradient into the pieces that are sent separately.

        While one piece is between groups, the next is inside of one.
        """
        compressor = self._everyone.compressor_of(variable, gradient)
        # The same on all replicas, in whatever group they are.
        multiple, parts = self._within.size, [gradient]
        if compressor is None or compressor.supports_reduce_scatter or compressor.is_linear:
            multiple *= 1 if compressor is None else compressor.row_multiple
            parts = pieces(gradient, self._bucket_bytes, multiple)
        if len(parts) == 1:
            return [_Part(number, gradient, variable)]
        # States are those of pieces. With the variable, or another could get its id.
        _, owners = self._pieces.setdefault(id(variable), (variable, []))
        owners += [_Path(variable.path, variable.shape) for _ in parts[len(owners) :]]
        return [_Part(number, *part) for part in zip(parts, owners)]

    def _is_compressed(self, part: _Part) -> bool:
        if self._compressor is None:
            return False
        own = part.variable.path, part.variable.shape, part.tensor.dtype
        return self._compressor.for_variable(*own) is not None

    def _sum_bucket(
        self,
        bucket: Sequence[_Part],
        compressor: Compressor | None,
        step: tf.Tensor,
        inside: HopOrder,
        between: HopOrder,
    ) -> _Sums:
        tensors, variables = inside.wait([p.tensor for p in bucket]), [p.variable for p in bucket]
        hop, costs = self._within, list[TensorTraffic]()
        cuts = [Cut.of(tensor, hop.size) for tensor in tensors]

        def further(row: tf.Tensor) -> tf.Tensor:
            inside.end([row])
            own = [tf.cast(p, t.dtype) for p, t in zip(shards_of(row, cuts), tensors)]
            sums, counted = self._between.sum_and_count(between.wait(own), variables, step)
            between.end(sums)
            costs.extend(counted)
            return tf.cast(row_of(sums), row.dtype)

        rows, both = rows_of(tensors, cuts), None
        if compressor is not None:
            rows = tf.cast(rows, tf.float32)
            # It depends on the group's size as well.
            name = f"{bucket_key(map(self.states.number, variables))} of {hop.size}"
            both = codings(compressor, step, self.states, name)
        rows = hop.sum_rows(rows, both, further)
        sums = [tf.cast(s, t.dtype) for s, t in zip(wholes_of(rows, cuts), tensors)]
        for i, (cut, tensor) in enumerate(zip(cuts, tensors)):
            row_bytes = cut.width * tensor.dtype.size
            if compressor is not None:
                row_bytes = compressor.row_bytes((cut.width,), tensor.dtype)
            costs[i] = costs[i]._replace(
                logical=tensor.shape.num_elements() * tensor.dtype.size,
                # Of the whole gradient, as the group sends it.
                compressed=costs[i].compressed * hop.size,
                wire=costs[i].wire + 2 * (hop.size - 1) * row_bytes,
                between=costs[i].wire,
            )
        return sums, costs


def _is_dense(gradient: Gradient) -> bool:
    return not isinstance(gradient, tf.IndexedSlices) and bool(gradient.shape.num_elements())


class GradientReducer:
    """Sums gradients in replica context; what is kept belongs to the optimizer they are for."""

    def __init__(
        self,
        launchers: Sequence[Launcher],
        first_rank: int,
        replicas: int,
        hops: Hops,
        bucket_bytes: int,
        levels: Sequence[Levels] | None,
        state: MirroredState,
    ) -> None:
        self._launchers, self._first_rank = launchers, first_rank
        self._replicas, self._hops, self._bucket_bytes = replicas, hops, bucket_bytes
        self._levels, self._state = levels, state
        self._of_owner = weakref.WeakKeyDictionary[Any, dict[str, list[Any]]]()
        self._eager = weakref.WeakKeyDictionary[Any, dict[Any, Callable[..., Any]]]()
        self.communication = Communication()

    @property
    def compresses(self) -> bool:
        return any(compressor is not None for compressor in self._hops)

    @functools.cached_property
    def takes_products(self) -> bool:
        """Whether a compressor may take the factors of a gradient that is a product."""
        chosen = [one for compressor in self._hops for one in methods.each(compressor)]
        # One that has a choice of its own may choose any.
        return any(not methods.missing(c, n) for c in chosen for n in ("factored", "for_variable"))

    def sum(
        self,
        grads: Sequence[tf.Tensor | tf.IndexedSlices],
        variables: Sequence[Any],
        step: tf.Tensor,
        owner: Any,
        kind: str = "gradient",
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Sums gradients, in replica context.

        Args:
            owner: Object that residuals live as long as: the optimizer.
            kind: `"gradient"`; `"change"` for what weights have changed by, with residuals of its
                own; `"group"` for sums over the replica's group alone; or `"copy"`, which is not
                compressed.
        """
        context = tf.distribute.get_replica_context()
        if tf.executing_eagerly():
            # Eager replicas run one after the other: only a merge_call lets all of them take part.
            merged = functools.partial(self._merged, variables=variables, owner=owner, kind=kind)
            return context.merge_call(merged, (list(grads), step))
        return self._sum(context._replica_id, grads, variables, step, owner, kind)

    def _merged(
        self,
        strategy: tf.distribute.Strategy,
        grads: Any,
        step: tf.Tensor,
        variables: Sequence[Any],
        owner: Any,
        kind: str,
    ) -> list[Any]:
        local = strategy.experimental_local_results
        by_replica = [
            [local(gradient)[i] for gradient in grads] for i in range(len(self._launchers))
        ]
        functions = self._eager.setdefault(owner, {})
        # Not by their paths, which others may have as well; the function keeps them alive.
        key = kind, *map(id, variables)
        if key not in functions:
            own = weakref.ref(owner)

            def sum_all(by_replica: Sequence[Sequence[Any]], step: tf.Tensor) -> list[list[Any]]:
                return [
                    self._sum(i, grads, variables, step, own(), kind)
                    for i, grads in enumerate(by_replica)
                ]

            # AutoGraph would take seconds to find that nothing here branches on tensors.
            functions[key] = tf.function(sum_all, autograph=False)
        summed = functions[key](by_replica, local(step)[0])
        return [distribute_utils.regroup(tuple(replicas)) for replicas in zip(*summed)]

    def sum_parts(
        self,
        parts: Sequence[tf.Tensor | tf.IndexedSlices],
        variables: Sequence[Any],
        optimizer: Any,
        engine: Engine,
        largest: Callable[[list[Any]], list[Any]],
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Sums replicas' parts of gradients, by an optimizer's compressors if there is one."""
        variables = [v if hasattr(v, "path") else _Path(v.name, v.shape) for v in variables]
        sums = [with_shape(g, v) for g, v in zip(parts, variables)]
        # A row that came twice stays so, as in one process: the step may take norms of rows.
        copied = [
            i for i, g in enumerate(sums) if optimizer is None or isinstance(g, tf.IndexedSlices)
        ]
        others = [i for i in range(len(sums)) if i not in copied]
        kept = [i for i in range(len(sums)) if is_overwritten(variables[i])]
        for i, value in zip(kept, largest([sums[i] for i in kept])):
            sums[i] = value
        copied, others = ([i for i in one if i not in kept] for one in (copied, others))
        for numbers, owner, kind in ((copied, engine, "copy"), (others, optimizer, "gradient")):
            if numbers:
                step = 0 if optimizer is None else tf.convert_to_tensor(optimizer.iterations)
                chosen = [sums[i] for i in numbers], [variables[i] for i in numbers]
                found = self.sum(*chosen, tf.cast(step, tf.int64), owner, kind)
                for i, total in zip(numbers, found):
                    sums[i] = total
        return sums

    def sum_on(
        self,
        replica: int,
        grads: Sequence[tf.Tensor | tf.IndexedSlices],
        variables: Sequence[Any],
        step: tf.Tensor,
        owner: Any,
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Equivalent of `sum` for a local replica, outside of replica context.

        `replica` is its number on this worker.
        """
        return self._sum(replica, grads, variables, step, owner, "gradient")

    def _sum(
        self,
        replica: int,
        grads: Sequence[Any],
        variables: Sequence[Any],
        step: tf.Tensor,
        owner: Any,
        kind: str,
    ) -> list[Any]:
        with ops.device(self._launchers[replica]._device):
            grads = list(grads)
            in_rows = [i for i, one in enumerate(grads) if isinstance(one, tf.IndexedSlices)]
            # As they are in one process, of the rows of all replicas.
            joins = [
                duplicate_rows.whole_of(g) if i in in_rows else None for i, g in enumerate(grads)
            ]
            for i in in_rows:
                grads[i] = duplicate_rows.summed_for(owner, grads[i])
            return self._sums(owner, kind)[replica](grads, variables, step, joins)

    def _sums(self, owner: Any, kind: str) -> list[GradientSum]:
        of_owner = self._of_owner.setdefault(owner, {})
        if kind not in of_owner:
            # Replicas of one graph would wait for each other's clocks, and so for ever: TensorFlow
            # keeps stateful operations in order.
            timed = len(self._launchers) == 1
            sums = [
                self._make_sum(i, kind, timed, states.within(kind))
                for i, states in enumerate(self._state.states_of(owner))
            ]
            of_owner[kind] = sums
            # That of one replica stands for all: each sends the same. It outlives the optimizer,
            # as totals are of all that was ever sent.
            traffic_variables = sums[0].traffic_variables
            self.communication.add_source(
                traffic_variables.traffic, lambda: traffic_variables.seconds
            )
        return of_owner[kind]

    def _make_sum(self, replica: int, kind: str, timed: bool, states: ReplicaStates) -> GradientSum:
        size = self._bucket_bytes
        hops = Hops(None, None) if kind == "copy" else self._hops
        ring = Hop(self._launchers[replica], range(self._replicas), self._first_rank + replica)
        if self._levels is None:
            return RingSum(ring, hops.between, size, timed, states)
        levels = self._levels[replica]
        if kind == "group":
            compressor = hops.within if levels.within.size > 1 else None
            return RingSum(levels.within, compressor, size, timed, states)
        return TwoLevelSum(ring, levels, hops, size, timed, states)


def with_shape(gradient: Any, variable: Any) -> Any:
    """A gradient with its variable's shape: some reach us without a static one."""
    shape = gradient_shape(variable)
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.ensure_shape(gradient.values, [None, *shape[1:]])
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.ensure_shape(gradient, shape)


def is_overwritten(variable: Any) -> bool:
    """Whether a variable takes its gradient's value, as scales of float8 do."""
    return getattr(variable, "overwrite_with_gradient", False)
