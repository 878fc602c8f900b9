"""Tensors as matrices with one row, or shard, for each replica of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

# Matrices of fewer rows for each shard are cut like vectors: filling up would add more than 1/8.
_LEAST_ROWS = 8


class Cut(NamedTuple):
    """Layout of a tensor that is cut into shards.

    Attributes:
        shape: Static shape of the tensor.
        shard: That of each shard: rows of its matrix, so that low-rank compressors can work on it,
            or a vector.
        number: Number of shards.
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
