"""Rows in chunks of memory, none of which is ever copied.

Each chunk is as large as all before it.

    chunk        0          1              2
    rows     0 .. n-1   n .. 2n-1     2n .. 4n-1

The operating system gives a chunk memory page by page, where it is first written.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_psplus.tf_internals import resource_variable_ops

_INT = tf.int32
_FIRST_BYTES, _LEAST_ROWS = 1 << 26, 1 << 10
MOST_ROWS = 1 << 30
_numbers = itertools.count()


def traced(function: Callable[..., Any], *signature: tf.TensorSpec) -> Any:
    """Concrete function that stays one operation in the graphs of others."""
    of_graph = tf.function(
        function,
        input_signature=signature,
        autograph=False,
        experimental_attributes={"_noinline": True},
    )
    # TensorFlow would warn of many functions that are called once.
    return of_graph.get_concrete_function()


def traced_once(function: Callable[..., Any], *signature: tf.TensorSpec) -> Any:
    """Function with a graph of its own, which is one operation in others."""
    made: list[Any] = []

    def call(*args: tf.Tensor) -> Any:
        if not made:
            with tf.init_scope():
                made.append(traced(function, *signature))
        return made[0](*args)

    return call


class ChunkedRows:
    """Matrix that grows by rows; its methods may be called in graphs.

    Args:
        columns: Its columns.
        dtype: Its type.
        most: The most rows that it may have; None for `MOST_ROWS`.
        is_new: Function that returns whether nobody waits yet for what is executed first.
    """

    def __init__(
        self,
        columns: int,
        dtype: tf.DType,
        most: int | None = None,
        is_new: Callable[[], tf.Tensor] | None = None,
    ) -> None:
        self.dtype, self._columns, self._is_new = dtype, columns, is_new
        most = most or MOST_ROWS
        self.shape, self.name = tf.TensorShape([most, columns]), "rows"
        self._unique_id = f"keras_psplus_rows_{next(_numbers)}"
        first = max(_LEAST_ROWS, _FIRST_BYTES // (dtype.size * columns))
        self._starts, self._sizes = [0], [min(1 << first.bit_length() - 1, most)]
        while self._starts[-1] + self._sizes[-1] < most:
            self._starts.append(self._starts[-1] + self._sizes[-1])
            self._sizes.append(self._starts[-1])
        with tf.init_scope(), tf.device("/CPU:0"):
            # Of a known shape, as TensorFlow sends no other handles from one task to another.
            self._chunks = [
                resource_variable_ops.UninitializedVariable(
                    trainable=False, shape=[size, columns], dtype=dtype
                )
                for size in self._sizes
            ]
            self._used = tf.Variable(0, dtype=_INT, trainable=False)
        self._read_all, self._write_all, self._make = _functions(
            dtype, columns, tuple(self._starts), tuple(self._sizes)
        )
        self.allocate(tf.constant(1))

    def allocate(self, rows: tf.Tensor) -> None:
        """Sees that there is memory for the rows below a number."""
        used = self._used.read_value()
        needed = tf.reduce_sum(tf.cast(tf.constant(self._starts) < rows, _INT))

        def more() -> tf.Tensor:
            # Readers of the rows read their number before.
            with tf.control_dependencies([self._make(used, needed, *self._handles)]):
                return self._used.assign(needed, read_value=True)

        tf.cond(needed > used, more, lambda: used)

    def sparse_read(self, rows: tf.Tensor) -> tf.Tensor:
        """Rows of an int32 vector of numbers, for which there is memory."""
        found = self._if_several(
            lambda: self._read_all(rows, *self._handles), lambda: self._chunks[0].sparse_read(rows)
        )
        return tf.ensure_shape(found, [None, self._columns])

    def _if_several(
        self, several: Callable[[], tf.Tensor], one: Callable[[], tf.Tensor]
    ) -> tf.Tensor:
        if len(self._chunks) == 1:
            return one()
        uses_several = self._used.read_value() > 1
        if self._is_new is not None:
            # TensorFlow makes a function ready when it is first executed, which takes as long as
            # some updates do: rather at the start than in the update that begins a second chunk.
            uses_several = tf.logical_or(uses_several, self._is_new())
        return tf.cond(uses_several, several, one)

    @property
    def _handles(self) -> list[tf.Tensor]:
        return [chunk.handle for chunk in self._chunks]

    def write(self, rows: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        """Writes distinct rows; returns a tensor to wait for."""
        return self._if_several(
            lambda: self._write_all(rows, values, *self._handles),
            lambda: _write_to(self._chunks[0].handle, rows, values),
        )


@functools.cache
def _functions(
    dtype: tf.DType, columns: int, starts: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[Any, Any, Any]:
    """Functions of several chunks, for all that have such chunks: read, write and make.

    Args:
        dtype: Of the rows.
        columns: Of the rows.
        starts: First row of each chunk.
        sizes: Rows of each chunk.
    """

    def places(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Chunk of each row, and its number there."""
        chunks = tf.searchsorted(tf.constant(starts), rows, side="right") - 1
        return chunks, rows - tf.gather(tf.constant(starts), chunks)

    def read(rows: tf.Tensor, *handles: tf.Tensor) -> tf.Tensor:
        chunks, inside = places(rows)
        order = tf.dynamic_partition(tf.range(tf.size(rows)), chunks, len(starts))
        parts = [
            tf.cond(
                tf.size(own) > 0,
                lambda handle=handle, own=own: _read_from(handle, own, dtype, columns),
                lambda: tf.zeros([0, columns], dtype),
            )
            for handle, own in zip(handles, tf.dynamic_partition(inside, chunks, len(starts)))
        ]
        return tf.dynamic_stitch(order, parts)

    def write(rows: tf.Tensor, values: tf.Tensor, *handles: tf.Tensor) -> tf.Tensor:
        chunks, inside = places(rows)
        own = [tf.dynamic_partition(of, chunks, len(starts)) for of in (inside, values)]
        for handle, ids, part in zip(handles, *own):
            tf.cond(
                tf.size(ids) > 0,
                lambda handle=handle, ids=ids, part=part: _write_to(handle, ids, part),
                lambda: 0,
            )
        return tf.constant(0)

    def make_one(handle: tf.Tensor, size: tf.Tensor, is_due: tf.Tensor) -> tf.Tensor:
        def made() -> int:
            # Assigned before anything reads it: afterwards, TensorFlow would copy it.
            empty = tf.raw_ops.Empty(shape=tf.stack([size, columns]), dtype=dtype)
            tf.raw_ops.AssignVariableOp(resource=handle, value=empty)
            return 0

        return tf.cond(is_due, made, lambda: 0)

    one, number = tf.TensorSpec([], tf.resource), tf.TensorSpec([], _INT)
    make_chunk = traced_once(make_one, one, number, tf.TensorSpec([], tf.bool))

    def make(used: tf.Tensor, needed: tf.Tensor, *handles: tf.Tensor) -> tf.Tensor:
        for i, (handle, size) in enumerate(zip(handles, sizes)):
            make_chunk(handle, tf.constant(size), tf.logical_and(used <= i, i < needed))
        return needed

    ids, values = tf.TensorSpec([None], _INT), tf.TensorSpec([None, columns], dtype)
    handles = [one] * len(starts)
    return (
        traced_once(read, ids, *handles),
        traced_once(write, ids, values, *handles),
        traced_once(make, number, number, *handles),
    )


def _read_from(handle: tf.Tensor, rows: tf.Tensor, dtype: tf.DType, columns: int) -> tf.Tensor:
    found = tf.raw_ops.ResourceGather(resource=handle, indices=rows, dtype=dtype)
    return tf.ensure_shape(found, [None, columns])


def _write_to(handle: tf.Tensor, rows: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    written = tf.raw_ops.ResourceScatterUpdate(resource=handle, indices=rows, updates=values)
    with tf.control_dependencies([] if written is None else [written]):
        return tf.constant(0)
