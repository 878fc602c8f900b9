"""Sums of gradients over replicas, along one ring or hop by hop."""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import tensorflow as tf

from keras_psplus.all_reduce.collectives import gradients
from keras_psplus.all_reduce.collectives.gradients import HopOrder
from keras_psplus.all_reduce.collectives.operations import Launcher
from keras_psplus.all_reduce.reduction import routes
from keras_psplus.all_reduce.reduction.compressed import CompressedSum
from keras_psplus.all_reduce.reduction.replica_states import ReplicaStates
from keras_psplus.all_reduce.topology import shards
from keras_psplus.all_reduce.topology.group_topology import Hops
from keras_psplus.all_reduce.topology.levels import Levels
from keras_psplus.communication import Communication
from keras_psplus.compression import methods
from keras_psplus.core.batch import duplicate_rows
from keras_psplus.core.batch.duplicate_rows import Joins
from keras_psplus.core.batch.replica_step import TensorTraffic, TrafficVariables
from keras_psplus.core.graph.stand_ins import Gradient
from keras_psplus.core.graph.variables import gradient_shape
from keras_psplus.tf_internals import distribute_utils
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.updates.base import numbers_of

if TYPE_CHECKING:
    from keras_psplus.all_reduce.reduction.replica_states import MirroredState
    from keras_psplus.engine import Engine


# Two-level all-reduce of one replica's gradients: inside groups, and between them.
#
# Links inside a rack or a host are fast, and shared by few. The slow links carry each gradient once
# for each group, and not once for each worker (Jia et al., "Highly Scalable Deep Learning Training
# System with Mixed-Precision", 2018; Goyal et al., "Accurate, Large Minibatch SGD", 2017, section
# 4).
#
# Here are two groups of two replicas, and gradients of two shards:
#
#             group 0                             group 1
#        r0           r1                     r2           r3
#     1. [a0 a1]  <-> [b0 b1]                [c0 c1]  <-> [d0 d1]     reduce-scatter inside
#     2. [a0+b0]      [a1+b1]   <- between -> [c0+d0]     [c1+d1]     all-reduce of equal shards
#     3. [s0]     <-> [s1]                   [s0]     <-> [s1]        all-gather inside
#        [s0 s1]      [s0 s1]                [s0 s1]      [s0 s1]
#
# While one bucket is between groups, the next is inside: `HopOrder` orders the sends.

_Grads: TypeAlias = Sequence[Gradient]
_Sums: TypeAlias = tuple[list[tf.Tensor], list[TensorTraffic]]
# Buckets that are on a hop at once. All of them at once would share its link and arrive together:
# none would be between groups while others are summed inside, nor be handed on while others are
# between groups.
_INSIDE, _BETWEEN = 1, 2


class _Piece(NamedTuple):
    """A piece of a variable, as far as its gradient's compressor has to know it."""

    path: str
    shape: Any


class _Part(NamedTuple):
    """A gradient or a piece of it, with its index and its variable."""

    number: int
    tensor: tf.Tensor
    variable: Any


class _Bucket(NamedTuple):
    """Gradients of one dtype that are sent together.

    Attributes:
        compressed: Whether they are compressed inside the group.
        inside, between: The turns on both hops.
    """

    tensors: list[tf.Tensor]
    variables: list[Any]
    compressed: bool
    step: tf.Tensor
    inside: HopOrder
    between: HopOrder


class TwoLevelSum:
    """Sums the gradients of one optimizer on one replica; the same interface as `CompressedSum`.

    `tf.IndexedSlices` go along one ring of all replicas, compressed as between groups: what has to
    be gathered is the same for all.
    """

    def __init__(
        self,
        launcher: Launcher,
        rank: int,
        replicas: int,
        hops: Hops,
        bucket_bytes: int,
        timed: bool,
        levels: Levels,
        states: ReplicaStates,
    ) -> None:
        self._levels, self._compressor = levels, hops.within
        # Small ones, for the hops to overlap.
        self._bucket_bytes, self._timed = max(1, bucket_bytes // 2), timed
        between = levels.between

        def sum_over(place: tuple[Launcher, int, int], name: str) -> CompressedSum:
            return CompressedSum(*place, hops.between, bucket_bytes, False, states.within(name))

        self._everyone = sum_over((launcher, rank, replicas), "everyone")
        self._between = sum_over((between.launcher, between.place, between.size), "between")
        self._own_states = states.within("within")
        self.traffic_variables = TrafficVariables()
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._owners: dict[int, tuple[Any, list[_Piece]]] = {}

    def __call__(
        self, grads: _Grads, variables: Sequence[Any], step: tf.Tensor, joins: Joins = ()
    ) -> list[Gradient]:
        """Sums gradients, as `CompressedSum` does."""
        summed: list[Any] = list(grads)
        entries: list[Any] = [None] * len(grads)
        dense = [i for i, g in enumerate(grads) if _is_dense(g)]
        others = [i for i in range(len(grads)) if i not in dense]
        # From the last layer back, as backprop makes them ready.
        parts = [part for i in reversed(dense) for part in self._parts(i, grads[i], variables[i])]
        results: dict[int, list[tuple[tf.Tensor, TensorTraffic]]] = {i: [] for i in dense}
        inside, between = HopOrder(_INSIDE), HopOrder(_BETWEEN)
        for (_, compressed), bucket in gradients.buckets(
            parts,
            lambda part: (part.tensor.dtype, self._is_compressed(part.variable, part.tensor)),
            lambda part: part.tensor.shape.num_elements() * part.tensor.dtype.size,
            self._bucket_bytes,
        ):
            tensors, owners = [p.tensor for p in bucket], [p.variable for p in bucket]
            tensors = inside.wait(tensors)
            sums, counted = self._sum_bucket(
                _Bucket(tensors, owners, compressed, step, inside, between)
            )
            for part, total, entry in zip(bucket, sums, counted, strict=True):
                results[part.number].append((total, entry))
        for i, pieces in results.items():
            totals, costs = zip(*pieces)
            summed[i] = totals[0]
            if len(totals) > 1:
                summed[i] = tf.reshape(tf.concat(totals, 0), grads[i].shape)
            entries[i] = TensorTraffic(*costs[0][:2], *map(sum, zip(*(e[2:6] for e in costs))))
        if others:
            chosen = [grads[i] for i in others], [variables[i] for i in others]
            own = [joins[i] for i in others] if joins else ()
            sums, of_ring = self._everyone.sum_and_count(*chosen, step, own)
            for i, total, entry in zip(others, sums, of_ring, strict=True):
                outside = self._levels.next_is_outside
                summed[i], entries[i] = total, entry._replace(between=entry.wire if outside else 0)
        self.traffic_variables.add(entries)
        if self._timed:
            self.traffic_variables.time(numbers_of(grads), numbers_of(summed))
        return summed

    def _parts(self, number: int, gradient: tf.Tensor, variable: Any) -> list[_Part]:
        """Splits a gradient into the pieces that are sent separately.

        While one piece is between groups, the next is inside of one.
        """
        compressor = self._everyone.compressor_of(variable, gradient)
        # The same on all replicas, in whatever group they are.
        multiple, pieces = self._levels.within.size, [gradient]
        if compressor is None or compressor.supports_reduce_scatter or compressor.is_linear:
            multiple *= 1 if compressor is None else compressor.row_multiple
            pieces = gradients.pieces(gradient, self._bucket_bytes, multiple)
        if len(pieces) == 1:
            return [_Part(number, gradient, variable)]
        # States are those of pieces. With the variable, or another could get its id.
        _, owners = self._owners.setdefault(id(variable), (variable, []))
        owners += [_Piece(variable.path, variable.shape) for _ in pieces[len(owners) :]]
        return [_Part(number, *piece) for piece in zip(pieces, owners)]

    def _is_compressed(self, variable: Any, gradient: tf.Tensor) -> bool:
        if self._compressor is None:
            return False
        chosen = self._compressor.for_variable(variable.path, variable.shape, gradient.dtype)
        return chosen is not None

    def _sum_between(
        self, tensors: list[tf.Tensor], variables: list[Any], step: tf.Tensor, turns: HopOrder
    ) -> _Sums:
        sums, entries = self._between.sum_and_count(turns.wait(tensors), variables, step)
        turns.end(sums)
        return sums, entries

    def _sum_bucket(self, bucket: _Bucket) -> _Sums:
        tensors, variables, compressed, step, inside, between = bucket
        hop, launcher = self._levels.within, self._levels.within.launcher
        cuts = [shards.Cut.of(tensor, hop.size) for tensor in tensors]
        rows = shards.rows_of(tensors, cuts)
        counted = []

        def further(row: tf.Tensor) -> tf.Tensor:
            inside.end([row])
            parts = [tf.cast(p, t.dtype) for p, t in zip(shards.shards_of(row, cuts), tensors)]
            sums, entries = self._sum_between(parts, variables, step, between)
            counted.extend(entries)
            return tf.cast(shards.row_of(sums), row.dtype)

        compressor = self._compressor if compressed else None
        if compressor is not None:
            rows = tf.cast(rows, tf.float32)
            name = self._name(variables)
            first = functools.partial(routes.rows_init, compressor, *map(int, rows.shape))
            state = self._own_states.read(name, first)
            rows, state, _ = routes.split_rows(
                launcher, hop.place, hop.size, compressor, rows, state, step, further
            )
            self._own_states.write(name, state)
        else:
            row = further(shards.scatter(launcher, rows))
            rows = shards.gather(launcher, row, hop.size)
        sums = [tf.cast(s, t.dtype) for s, t in zip(shards.wholes_of(rows, cuts), tensors)]
        entries = []
        for cut, tensor, entry in zip(cuts, tensors, counted, strict=True):
            within = 2 * (hop.size - 1) * self._row_bytes(cut.width, tensor.dtype, compressed)
            entries.append(
                entry._replace(
                    logical=tensor.shape.num_elements() * tensor.dtype.size,
                    # Of the whole gradient, as the group sends it.
                    compressed=entry.compressed * hop.size,
                    wire=entry.wire + within,
                    between=entry.wire,
                )
            )
        return sums, entries

    def _row_bytes(self, width: int, dtype: tf.DType, compressed: bool) -> int:
        own = self._compressor if compressed else None
        return int(width * dtype.size) if own is None else own.row_bytes((width,), dtype)

    def _name(self, variables: Iterable[Any]) -> str:
        """Name of a bucket's state inside groups: it depends on the group's size as well."""
        numbers = [self._number(variable) for variable in variables]
        return f"split {zlib.crc32(repr(numbers).encode()):08x} of {self._levels.within.size}"

    def _number(self, variable: Any) -> int:
        # With the variable, or another could get its id.
        return self._numbers.setdefault(id(variable), (len(self._numbers), variable))[0]


def _is_dense(gradient: Gradient) -> bool:
    return not isinstance(gradient, tf.IndexedSlices) and bool(gradient.shape.num_elements())


# One sum of gradients for each optimizer and local replica, and what they keep.


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
            grads: List of tensors of static shapes or `tf.IndexedSlices`.
            variables: Their variables, with a `path` and a `shape`.
            step: int64 scalar, the same on all replicas.
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

    def _sums(self, owner: Any, kind: str) -> list[CompressedSum | TwoLevelSum]:
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

    def _make_sum(
        self, replica: int, kind: str, timed: bool, states: ReplicaStates
    ) -> CompressedSum | TwoLevelSum:
        launcher, rank = self._launchers[replica], self._first_rank + replica
        hops = Hops(None, None) if kind == "copy" else self._hops
        if kind == "group":
            assert self._levels is not None
            hop, size = self._levels[replica].within, self._bucket_bytes
            compressor = hops.within if hop.size > 1 else None
            return CompressedSum(hop.launcher, hop.place, hop.size, compressor, size, timed, states)
        if self._levels is None:
            compressor, size = hops.between, self._bucket_bytes
            return CompressedSum(launcher, rank, self._replicas, compressor, size, timed, states)
        size, levels = self._bucket_bytes, self._levels[replica]
        return TwoLevelSum(launcher, rank, self._replicas, hops, size, timed, levels, states)


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


class _Path(NamedTuple):
    """Path of a TensorFlow variable, as needed to sum its gradients."""

    path: str
    shape: Any
