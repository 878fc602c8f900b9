"""Two-level all-reduce of one replica's gradients: inside groups, and between them.

Links inside a rack or a host are fast, and shared by few. The slow links carry each gradient once
for each group, and not once for each worker (Jia et al., "Highly Scalable Deep Learning Training
System with Mixed-Precision", 2018; Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 4).

Here are two groups of two replicas, and gradients of two shards:

            group 0                             group 1
       r0           r1                     r2           r3
    1. [a0 a1]  <-> [b0 b1]                [c0 c1]  <-> [d0 d1]     reduce-scatter inside
    2. [a0+b0]      [a1+b1]   <- between -> [c0+d0]     [c1+d1]     all-reduce of equal shards
    3. [s0]     <-> [s1]                   [s0]     <-> [s1]        all-gather inside
       [s0 s1]      [s0 s1]                [s0 s1]      [s0 s1]

While one bucket is between groups, the next is inside: `HopOrder` orders the sends.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

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
from keras_psplus.core.batch.duplicate_rows import Joins
from keras_psplus.core.batch.replica_step import TensorTraffic, TrafficVariables
from keras_psplus.core.graph.stand_ins import Gradient
from keras_psplus.updates.base import numbers_of

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

    Args:
        launcher: `operations.Launcher` of the replica among all of them.
        bucket_bytes: Size at which a bucket is sent, in bytes of uncompressed gradients.
        timed: Whether to measure for how long gradients are waited for.
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
        """Whether a gradient is compressed inside its group."""
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
