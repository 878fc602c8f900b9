"""Way of rows between workers: to the one whose row it is, and to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from keras_psplus.all_reduce.collectives import gradients
from keras_psplus.all_reduce.topology import group_routes

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher


class Route:
    """Reduce-scatter and gathering of matrices of one row for each worker.

    Args:
        launcher: Collectives of this worker.
        place: Place of this worker among those that share.
        size: Number of those.
    """

    def __init__(self, launcher: Launcher, place: int, size: int) -> None:
        self.launcher, self.place, self.size = launcher, place, size

    def scatter(self, rows: tf.Tensor) -> tf.Tensor:
        """Sum of this worker's row over all workers, as a matrix of one row."""
        return group_routes.scatter(self.launcher, rows)

    def gather(self, row: tf.Tensor) -> tf.Tensor:
        """All workers' rows as one matrix of static shape."""
        rows = group_routes.gather(self.launcher, row, self.size)
        return tf.ensure_shape(rows, [self.size, row.shape[1]])

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums of tensors of one dtype over all workers, on all of them."""
        return gradients.pack_and_sum(self.launcher, tensors)
