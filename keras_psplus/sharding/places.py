"""Places of a variable's state among the workers."""

from __future__ import annotations

import math
from typing import NamedTuple

import tensorflow as tf

from keras_psplus.all_reduce.collectives.hop import Cut

# Elements of a row that workers send whole.
_LONGEST_ROW = 1 << 18


class AxisCut(NamedTuple):
    """Layout of a tensor that is cut into equal parts along one axis.

    Attributes:
        number: Number of parts.
        copies: Number of workers that follow each other and have the same part.
    """

    shape: tf.TensorShape
    axis: int
    number: int
    copies: int = 1

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
        parts = tf.split(tensor, self.number, self.axis)
        return [part for part in parts for _ in range(self.copies)]

    def whole(self, rows: tf.Tensor, rank: int = 0) -> tf.Tensor:
        """The tensor of its parts, each of which is a row of a matrix.

        Of copies, which may differ where each worker adds up what it has itself, those of the
        workers in this one's row of the mesh are taken.
        """
        own = rows[rank % self.copies :: self.copies]
        parts = tf.unstack(tf.reshape(own, [self.number, *self.shard]))
        return tf.concat(parts, self.axis)


class PieceCut(NamedTuple):
    """Layout of a tensor that is cut along both axes of a mesh.

    Its parts along one are in pieces along the other.

    Of a mesh with `columns` columns, and a row for each piece of a part, workers are in the order
    of columns. With two of each:

        part 0 or the whole    piece 0, piece 1
        part 1 or the whole    piece 0, piece 1

    Attributes:
        split: Its parts, one for each column; None if each column has the whole.
        pieces: The pieces of a part, or of the whole.
        columns: Number of columns.
    """

    split: AxisCut | None
    pieces: Cut
    columns: int

    @property
    def shape(self) -> tf.TensorShape:
        return self.pieces.shape if self.split is None else self.split.shape

    @property
    def shard(self) -> tuple[int, ...]:
        return self.pieces.shard

    @property
    def width(self) -> int:
        return self.pieces.width

    def row(self, tensor: tf.Tensor, rank: int) -> tf.Tensor:
        """A worker's piece of the whole."""
        column, number = divmod(rank, self.pieces.number)
        if self.split is not None:
            tensor = tf.split(tensor, self.columns, self.split.axis)[column]
        return self.pieces.rows(tensor)[number]

    def whole(self, rows: tf.Tensor) -> tf.Tensor:
        """The tensor of its pieces, each of which is a row of a matrix."""
        if self.split is None:
            return self.pieces.whole(rows[: self.pieces.number])
        parts = [self.pieces.whole(one) for one in tf.split(rows, self.columns)]
        return tf.concat(parts, self.split.axis)


class Place(NamedTuple):
    """Workers that keep the state of one variable of the model.

    Attributes:
        cut: Layout of equal parts, one for each worker; None if it is not cut.
        owner: Rank of the one worker that has all of it; None if there is no single one. Without
            both, every worker has all of it.
    """

    cut: Cut | AxisCut | PieceCut | None = None
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
        """The layout of flat parts: of the whole, or of its part along an axis."""
        cut = self.cut.pieces if isinstance(self.cut, PieceCut) else self.cut
        assert isinstance(cut, Cut)
        return cut

    @property
    def is_everywhere(self) -> bool:
        return self.cut is None and self.owner is None

    def local_shape(self, shape: tf.TensorShape, rank: int) -> tf.TensorShape:
        """Static shape of what a worker keeps of a tensor: none of another owner's."""
        if self.cut is not None:
            return tf.TensorShape(self.cut.shard)
        return shape if self.owner in (None, rank) else tf.TensorShape([0])

    def local_part(self, value: tf.Tensor, rank: int) -> tf.Tensor:
        if isinstance(self.cut, PieceCut):
            return tf.reshape(self.cut.row(value, rank), self.cut.shard)
        if self.cut is not None:
            return tf.reshape(self.cut.rows(value)[rank], self.cut.shard)
        return value if self.owner in (None, rank) else tf.zeros([0], value.dtype)

    def whole(self, rows: tf.Tensor, rank: int) -> tf.Tensor:
        """The tensor that is cut, of all workers' parts as rows of a matrix."""
        assert self.cut is not None
        if isinstance(self.cut, AxisCut):
            return self.cut.whole(rows, rank)
        return self.cut.whole(rows)

    def in_order(self, value: tf.Tensor) -> tf.Tensor:
        """A whole tensor whose parts along an axis, if there are any, follow each other."""
        split = self.cut.split if isinstance(self.cut, PieceCut) else None
        if split is None:
            return value
        return tf.stack(tf.split(value, split.number, split.axis))

    def span(self, rank: int) -> tuple[int, int]:
        """First and last of a worker's rows, or elements, among those of `in_order`."""
        pieces = self.parts
        length, *of_row = pieces.shard
        size, first = pieces.shape.num_elements() // math.prod(of_row), 0
        if isinstance(self.cut, PieceCut):
            column, rank = divmod(rank, pieces.number)
            first = 0 if self.cut.split is None else column * size
        return first + rank * length, first + min((rank + 1) * length, size)

    def holds(self, rank: int) -> bool:
        """Whether a worker updates the variable, or a part of it."""
        return self.owner in (None, rank)
