"""Tensors as matrices with one row, or shard, for each replica of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import tensorflow as tf

from keras_psplus import compression
from keras_psplus.all_reduce.collectives import gradients

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher
    from keras_psplus.all_reduce.topology.group_topology import Topology
    from keras_psplus.all_reduce.topology.levels import Hop


# Matrices of fewer rows for each shard are cut like vectors: filling up would add more than 1/8.
_LEAST_ROWS = 8


class Cut(NamedTuple):
    """Layout of a tensor that is cut into shards.

    Attributes:
        shape: Static shape of the tensor.
        shard: That of each shard: rows of its matrix, so that low-rank compressors can work on it,
            or a vector.
    """

    shape: tf.TensorShape
    shard: tuple[int, ...]
    number: int

    @classmethod
    def of(cls, tensor: tf.Tensor, number: int) -> Cut:
        """Cuts a tensor of static shape into so many shards of one shape."""
        size = tensor.shape.num_elements()
        if tensor.shape.rank > 1:
            columns = tensor.shape[-1]
            rows = size // columns
            if rows % number == 0 or rows >= _LEAST_ROWS * number:
                return cls(tensor.shape, (-(-rows // number), columns), number)
        return cls(tensor.shape, (-(-size // number),), number)

    @property
    def width(self) -> int:
        """Number of elements of a shard."""
        return tf.TensorShape(self.shard).num_elements()

    def rows(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor as a matrix, one row for each shard, filled up with zeros."""
        flat = tf.reshape(tensor, [-1])
        missing = self.number * self.width - self.shape.num_elements()
        if missing:
            flat = tf.pad(flat, [[0, missing]])
        return tf.reshape(flat, [self.number, self.width])

    def whole(self, rows: tf.Tensor) -> tf.Tensor:
        """The inverse of `rows`."""
        flat = tf.reshape(rows, [-1])
        return tf.reshape(flat[: self.shape.num_elements()], self.shape)


def rows_of(tensors: Sequence[tf.Tensor], cuts: Sequence[Cut]) -> tf.Tensor:
    """Concatenates tensors of one dtype to a matrix with one row per shard."""
    return _side_by_side([cut.rows(tensor) for cut, tensor in zip(cuts, tensors)])


def wholes_of(rows: tf.Tensor, cuts: Sequence[Cut]) -> list[tf.Tensor]:
    """The inverse of `rows_of`."""
    return [cut.whole(part) for cut, part in zip(cuts, _split(rows, cuts))]


def shards_of(row: tf.Tensor, cuts: Sequence[Cut]) -> list[tf.Tensor]:
    """The shards in one row of what `rows_of` returns."""
    return [tf.reshape(part, cut.shard) for cut, part in zip(cuts, _split(row, cuts))]


def row_of(shards: Sequence[tf.Tensor]) -> tf.Tensor:
    """The inverse of `shards_of`."""
    return _side_by_side([tf.reshape(shard, [1, -1]) for shard in shards])


def _side_by_side(matrices: Sequence[tf.Tensor]) -> tf.Tensor:
    return matrices[0] if len(matrices) == 1 else tf.concat(matrices, 1)


def _split(rows: tf.Tensor, cuts: Sequence[Cut]) -> list[tf.Tensor]:
    return [rows] if len(cuts) == 1 else tf.split(rows, [cut.width for cut in cuts], 1)


# Routes of uncompressed tensors inside a group, in two halves.
#
# TensorFlow has no reduce-scatter on CPUs: rows are exchanged, and each replica sums its row. With
# replicas r0, r1 and r2 of a group, whose matrices have the rows a, b and c:
#
#               scatter: exchange           sum              gather
#     r0        a0 a1 a2 -> a0 b0 c0 ->  s0 = a0+b0+c0  ->  s0 s1 s2
#     r1        b0 b1 b2 -> a1 b1 c1 ->  s1 = a1+b1+c1  ->  s0 s1 s2
#     r2        c0 c1 c2 -> a2 b2 c2 ->  s2 = a2+b2+c2  ->  s0 s1 s2
#
# Between the two halves, `s0` to `s2` are summed with the other groups' (see `two_levels`).


def scatter(launcher: Launcher, rows: tf.Tensor) -> tf.Tensor:
    """Reduce-scatter: sums a matrix with one row per replica; each receives its row."""
    size = rows.shape[0]
    received = _exchanged(launcher, rows, size)
    # As in a ring, the sum of what takes two bytes has more on its way.
    wide = tf.float32 if rows.dtype.is_floating and rows.dtype.size == 2 else rows.dtype
    total = tf.add_n(tf.unstack(tf.cast(received, wide), size))
    return tf.cast(total, rows.dtype)[tf.newaxis]


def _exchanged(launcher: Launcher, rows: tf.Tensor, size: int) -> tf.Tensor:
    if rows.dtype == tf.float32:
        return launcher.all_to_all(rows)
    words = launcher.all_to_all(compression.pack((rows,), size))
    return compression.unpack(words, (rows,), size)[0]


def gather(launcher: Launcher, row: tf.Tensor, size: int) -> tf.Tensor:
    """All replicas' rows, in the order of their places."""
    if row.dtype == tf.float32:
        return launcher.gather(row)
    words = launcher.gather(compression.pack((row,), 1))
    like = tf.zeros([size, row.shape[1]], row.dtype)
    return compression.unpack(words, (like,), size)[0]


# Way of rows between workers: to the one whose row it is, and to all.
#
# With the groups of a topology, rows go in two hops, so that links between groups carry one sum of
# each group. Rows are in the order of places, which is not that of ranks: first those of the
# workers that come first in their groups, and so on. With groups (r0, r1) and (r2, r3):
#
#             rows: of r0, r2, r1, r3       inside                         between
#     r0      a0 b0 c0 d0         ->  a0+a1 b0+b1         ->  a0+a1+a2+a3
#     r1      a1 b1 c1 d1         ->  c0+c1 d0+d1         ->  c0+c1+c2+c3
#     r2      a2 b2 c2 d2         ->  a2+a3 b2+b3         ->  b0+b1+b2+b3
#     r3      a3 b3 c3 d3         ->  c2+c3 d2+d3         ->  d0+d1+d2+d3
#
# Rows that are gathered go the same way back.


def ranks_by_place(topology: Topology) -> list[int]:
    """Ranks of the workers in the order of their rows.

    Example:

    >>> ranks_by_place(Topology(((0, 1), (2, 3))))
    [0, 2, 1, 3]
    """
    # As `levels_of` sorts those that have the same place in their groups.
    return [rank for peers in zip(*topology.groups) for rank in sorted(peers)]


class Route:
    """Reduce-scatter and gathering of matrices of one row for each worker."""

    def __init__(
        self, launcher: Launcher, place: int, size: int, within: Hop | None = None
    ) -> None:
        self.launcher, self.place, self.size, self._within = launcher, place, size, within

    @property
    def group_size(self) -> int:
        """Number of workers in each group; 1 if rows go in one hop."""
        return 1 if self._within is None else self._within.size

    @property
    def workers(self) -> int:
        """Number of workers that have a row."""
        return self.group_size * self.size

    def scatter(self, rows: tf.Tensor) -> tf.Tensor:
        """Sum of this worker's row over all workers, as a matrix of one row."""
        return scatter(self.launcher, self.scatter_within(rows))

    def gather(self, row: tf.Tensor) -> tf.Tensor:
        """All workers' rows as one matrix of static shape."""
        rows = gather(self.launcher, row, self.size)
        return self.gather_within(tf.ensure_shape(rows, [self.size, row.shape[1]]))

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums of tensors of one dtype over all workers, on all of them."""
        within = self._within
        if within is None:
            return gradients.pack_and_sum(self.launcher, tensors)
        cuts = [Cut.of(tensor, within.size) for tensor in tensors]
        row = scatter(within.launcher, rows_of(tensors, cuts))
        rows = gather(within.launcher, self.launcher.all_reduce(row), within.size)
        return wholes_of(rows, cuts)

    def scatter_within(self, rows: tf.Tensor) -> tf.Tensor:
        """First hop: sums over the group of the rows of this worker's place."""
        if self._within is None:
            return rows
        width = rows.shape[1]
        of_places = tf.reshape(rows, [self.group_size, self.size * width])
        return tf.reshape(scatter(self._within.launcher, of_places), [self.size, width])

    def gather_within(self, rows: tf.Tensor) -> tf.Tensor:
        """Last hop of gathered rows: all workers' rows, of those that came from other groups."""
        if self._within is None:
            return rows
        width = rows.shape[1]
        own = tf.reshape(rows, [1, self.size * width])
        of_places = gather(self._within.launcher, own, self.group_size)
        return tf.reshape(of_places, [self.workers, width])
