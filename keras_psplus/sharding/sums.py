"""Sums and new values of variables with owners, norms of parts, and parts of rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import ops
from keras_psplus.updates import map_values
from keras_psplus.updates.base import zeros_like

if TYPE_CHECKING:
    from keras.optimizers import Optimizer

    from keras_psplus.all_reduce.collectives.hop import Cut, Route
    from keras_psplus.engine import Variables
    from keras_psplus.sharding.places import Place

Sums = Callable[[list[tf.Tensor]], list[tf.Tensor]]


class OwnerLayout:
    """Tensors of one dtype as a matrix: its r-th row is worker r's.

    Args:
        shapes: Static shapes of the tensors.
        owners: Their owners' ranks.
    """

    def __init__(
        self, shapes: Sequence[tf.TensorShape], owners: Sequence[int], workers: int
    ) -> None:
        self._shapes, self._workers = shapes, workers
        self._sizes = [math.prod(shape) for shape in shapes]
        self._of_row = [
            [i for i, owner in enumerate(owners) if owner == rank] for rank in range(workers)
        ]
        self._width = max(sum(self._sizes[i] for i in row) for row in self._of_row)

    @property
    def widths(self) -> list[int]:
        """Elements for each tensor that a worker sends to each of the others, filled up."""
        total = max(1, sum(self._sizes))
        # An all-reduce sends two parts to each.
        each = self._width if self._is_balanced else -(-2 * total // self._workers)
        return [-(-each * size // total) for size in self._sizes]

    @property
    def _is_balanced(self) -> bool:
        """Whether filled rows are fewer bytes than an all-reduce of everything."""
        return self._workers * self._width <= 2 * sum(self._sizes)

    def scatter(
        self, route: Route, tensors: Sequence[tf.Tensor], rank: int
    ) -> list[tf.Tensor | None]:
        """Sums tensors over the workers; their owners receive the sums, and others None."""
        sums: list[tf.Tensor | None] = [None] * len(tensors)
        if not self._is_balanced:
            totals = route.sum(tensors)
            for i in self._of_row[rank]:
                sums[i] = totals[i]
            return sums
        dtype = tensors[0].dtype
        rows = tf.stack([self._row([tensors[i] for i in row], dtype) for row in self._of_row])
        total = route.scatter(rows)[0]
        for i, value in zip(self._of_row[rank], self._split(total, rank)):
            sums[i] = value
        return sums

    def gather(self, route: Route, values: Sequence[tf.Tensor], rank: int) -> list[tf.Tensor]:
        """Returns all values on all workers; of those given, the owner's count."""
        if not self._is_balanced:
            owned = self._of_row[rank]
            own = [v if i in owned else zeros_like(v) for i, v in enumerate(values)]
            return route.sum(own)
        row = self._row([values[i] for i in self._of_row[rank]], values[0].dtype)
        rows = route.gather(row[tf.newaxis])
        found = list(values)
        for other, numbers in enumerate(self._of_row):
            for i, value in zip(numbers, self._split(rows[other], other)):
                found[i] = value
        return found

    def _row(self, tensors: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        if not tensors:
            return tf.zeros([self._width], dtype)
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
        return tf.pad(flat, [[0, self._width - flat.shape[0]]])

    def _split(self, row: tf.Tensor, rank: int) -> list[tf.Tensor]:
        numbers = self._of_row[rank]
        sizes = [self._sizes[i] for i in numbers]
        pieces = tf.split(row, [*sizes, self._width - sum(sizes)])
        return [tf.reshape(piece, self._shapes[i]) for i, piece in zip(numbers, pieces)]


def layouts(
    variables: Variables, places: Sequence[Place], numbers: Sequence[int], workers: int
) -> Iterator[tuple[list[int], OwnerLayout]]:
    """Yields numbers of variables of one dtype that have owners, and their layout."""
    for dtype in sorted({str(variables[i].dtype) for i in numbers}):
        own = [i for i in numbers if str(variables[i].dtype) == dtype]
        shapes = [tf.TensorShape(variables[i].shape) for i in own]
        owners = [owner for i in own if (owner := places[i].owner) is not None]
        yield own, OwnerLayout(shapes, owners, workers)


def part_of_slices(slices: tf.IndexedSlices, cut: Cut, rank: int) -> tf.IndexedSlices:
    """A worker's part of a gradient of rows: rows, or elements if rows are cut.

    What comes twice stays so: Keras squares the rows of a batch one by one.
    """
    if len(cut.shard) > 1:
        rows = tf.cast(slices.indices, tf.int64) - rank * cut.shard[0]
        inside = tf.logical_and(rows >= 0, rows < cut.shard[0])
        return tf.IndexedSlices(
            tf.boolean_mask(slices.values, inside),
            tf.boolean_mask(rows, inside),
            tf.constant(cut.shard, tf.int64),
        )
    columns = math.prod(slices.values.shape[1:])
    first = rank * cut.width
    starts = tf.cast(slices.indices, tf.int64) * columns
    touches = tf.logical_and(starts < first + cut.width, starts + columns > first)
    starts = tf.boolean_mask(starts, touches)
    values = tf.reshape(tf.boolean_mask(slices.values, touches), [-1])
    indices = tf.reshape(starts[:, tf.newaxis] + tf.range(columns, dtype=tf.int64) - first, [-1])
    inside = tf.logical_and(indices >= 0, indices < cut.width)
    return tf.IndexedSlices(
        tf.boolean_mask(values, inside),
        tf.boolean_mask(indices, inside),
        tf.constant([cut.width], tf.int64),
    )


def squares_of(grads: Sequence[Any], parts: Sequence[int], sum_over_parts: Sums) -> list[tf.Tensor]:
    """Squared norms of whole gradients, float32 scalars; arguments as for `clipped_by_norms`."""
    squares = [tf.zeros([]) if g is None else ops.sum(ops.square(g)) for g in grads]
    squares = [tf.cast(square, tf.float32) for square in squares]
    for i, total in zip(parts, sum_over_parts([squares[i] for i in parts])):
        squares[i] = total
    return squares


def scale_of(squares: Sequence[tf.Tensor], optimizer: Optimizer) -> tf.Tensor:
    """Factor by which an optimizer's `clipnorm`, or `global_clipnorm`, clips, as in Keras.

    Args:
        squares: Squared norms of what is clipped together.
    """
    limit, norm = optimizer.clipnorm or optimizer.global_clipnorm, ops.sqrt(tf.add_n(squares))
    if optimizer.clipnorm:
        return limit / tf.maximum(norm, limit)
    # Nothing that is not finite remains hidden.
    return limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)


def clipped_by_norms(
    optimizer: Optimizer,
    grads: Sequence[Any],
    dtype: tf.DType | str,
    parts: Sequence[int],
    sum_over_parts: Sums,
) -> list[Any]:
    """Gradients, clipped by an optimizer's `clipnorm` or `global_clipnorm`.

    Args:
        grads: List of gradients: whole, parts, or None for those of other workers.
        dtype: Dtype of scales for those.
        parts: Numbers of the gradients of which each worker has a part, or none.
        sum_over_parts: Function that sums small tensors over the workers that have the parts.
    """
    squares = squares_of(grads, parts, sum_over_parts)
    if optimizer.clipnorm:
        scales = [scale_of([square], optimizer) for square in squares]
    else:
        scales = [scale_of(squares, optimizer)] * len(grads)
    clipped: list[Any] = []
    for g, scale in zip(grads, scales):
        scale = tf.cast(scale, dtype if g is None else g.dtype)
        if optimizer.clipnorm and isinstance(g, tf.IndexedSlices):
            clipped.append(map_values(functools.partial(tf.multiply, scale), g))
        else:
            # By its global norm, Keras makes a gradient of rows dense.
            clipped.append(None if g is None else g * scale)
    return clipped
