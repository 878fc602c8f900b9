"""Places of a variable's state among the workers."""

from __future__ import annotations

import math
from typing import NamedTuple

import tensorflow as tf

from keras_psplus.all_reduce.topology.shards import Cut

# Elements of a row that workers send whole.
_LONGEST_ROW = 1 << 18


class AxisCut(NamedTuple):
    """Layout of a tensor that is cut into equal parts along one axis."""

    shape: tf.TensorShape
    axis: int
    number: int

    @property
    def shard(self) -> tuple[int, ...]:
        """Shape of each part."""
        sizes = list(self.shape)
        sizes[self.axis] //= self.number
        return tuple(sizes)

    @property
    def width(self) -> int:
        """Number of elements of a part."""
        return math.prod(self.shard)

    def rows(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        return list(tf.split(tensor, self.number, self.axis))

    def whole(self, rows: tf.Tensor) -> tf.Tensor:
        """The tensor of its parts, each of which is a row of a matrix."""
        parts = tf.unstack(tf.reshape(rows, [self.number, *self.shard]))
        return tf.concat(parts, self.axis)


class Place(NamedTuple):
    """Workers that keep the state of one variable of the model.

    Attributes:
        cut: Layout of equal parts, one for each worker; None if it is not cut.
        owner: Rank of the one worker that has all of it; None if there is no single one. Without
            both, every worker has all of it.
    """

    cut: Cut | AxisCut | None = None
    owner: int | None = None

    @classmethod
    def of_parts(cls, shape: tf.TensorShape | tuple[int, ...], workers: int) -> Place:
        """Cuts a tensor of static shape into parts of `ceil(size / workers)` elements.

        A part of a matrix is a matrix if no row is cut: rows of gradients change whole rows of it.
        """
        shape = tf.TensorShape(shape)
        shard: tuple[int, ...] = (-(-math.prod(shape) // workers),)
        if shape.rank == 2 and shape[0] % workers == 0 and 0 < shape[1] <= _LONGEST_ROW:
            shard = shape[0] // workers, shape[1]
        return cls(Cut(shape, shard, workers))

    @property
    def parts(self) -> Cut:
        """The layout of one that is cut into flat parts."""
        assert isinstance(self.cut, Cut)
        return self.cut

    @property
    def is_everywhere(self) -> bool:
        return self.cut is None and self.owner is None

    def local_shape(self, shape: tf.TensorShape, rank: int) -> tf.TensorShape:
        """Static shape of what a worker keeps of a tensor: none of another owner's."""
        if self.cut is not None:
            return tf.TensorShape(self.cut.shard)
        return shape if self.owner in (None, rank) else tf.TensorShape([0])

    def local_part(self, value: tf.Tensor, rank: int) -> tf.Tensor:
        if self.cut is not None:
            return tf.reshape(self.cut.rows(value)[rank], self.cut.shard)
        return value if self.owner in (None, rank) else tf.zeros([0], value.dtype)

    def holds(self, rank: int) -> bool:
        """Whether a worker updates the variable, or a part of it."""
        return self.owner in (None, rank)
