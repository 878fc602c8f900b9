"""Way of rows between workers: to the one whose row it is, and to all.

With the groups of a topology, rows go in two hops, so that links between groups carry one sum of
each group. Rows are in the order of places, which is not that of ranks: first those of the workers
that come first in their groups, and so on. With groups (r0, r1) and (r2, r3):

            rows: of r0, r2, r1, r3       inside                         between
    r0      a0 b0 c0 d0         ->  a0+a1 b0+b1         ->  a0+a1+a2+a3
    r1      a1 b1 c1 d1         ->  c0+c1 d0+d1         ->  c0+c1+c2+c3
    r2      a2 b2 c2 d2         ->  a2+a3 b2+b3         ->  b0+b1+b2+b3
    r3      a3 b3 c3 d3         ->  c2+c3 d2+d3         ->  d0+d1+d2+d3

What is gathered goes the same way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from keras_psplus.all_reduce.collectives import gradients
from keras_psplus.all_reduce.topology import group_routes, shards

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher
    from keras_psplus.all_reduce.topology.group_topology import Topology
    from keras_psplus.all_reduce.topology.levels import Hop


def ranks_by_place(topology: Topology) -> list[int]:
    """Ranks of the workers in the order of their rows.

    Example:

    >>> ranks_by_place(Topology(((0, 1), (2, 3))))
    [0, 2, 1, 3]
    """
    # As `levels_of` sorts those that have the same place in their groups.
    return [rank for peers in zip(*topology.groups) for rank in sorted(peers)]


class Route:
    """Reduce-scatter and gathering of matrices of one row for each worker.

    Args:
        launcher: Collectives of this worker: with groups, those between them.
        place: Place of this worker among those of the collectives.
        size: Number of those.
        within: Hop inside of this worker's group; None if rows go in one hop.
    """

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
        return group_routes.scatter(self.launcher, self.scatter_within(rows))

    def gather(self, row: tf.Tensor) -> tf.Tensor:
        """All workers' rows as one matrix of static shape."""
        rows = group_routes.gather(self.launcher, row, self.size)
        return self.gather_within(tf.ensure_shape(rows, [self.size, row.shape[1]]))

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums of tensors of one dtype over all workers, on all of them."""
        within = self._within
        if within is None:
            return gradients.pack_and_sum(self.launcher, tensors)
        cuts = [shards.Cut.of(tensor, within.size) for tensor in tensors]
        row = group_routes.scatter(within.launcher, shards.rows_of(tensors, cuts))
        rows = group_routes.gather(within.launcher, self.launcher.all_reduce(row), within.size)
        return shards.wholes_of(rows, cuts)

    def scatter_within(self, rows: tf.Tensor) -> tf.Tensor:
        """First hop: sums over the group of the rows of this worker's place."""
        if self._within is None:
            return rows
        width = rows.shape[1]
        of_places = tf.reshape(rows, [self.group_size, self.size * width])
        return tf.reshape(
            group_routes.scatter(self._within.launcher, of_places), [self.size, width]
        )

    def gather_within(self, rows: tf.Tensor) -> tf.Tensor:
        """Last hop of gathered rows: all workers' rows, of those that came from other groups."""
        if self._within is None:
            return rows
        width = rows.shape[1]
        own = tf.reshape(rows, [1, self.size * width])
        of_places = group_routes.gather(self._within.launcher, own, self.group_size)
        return tf.reshape(of_places, [self.workers, width])
