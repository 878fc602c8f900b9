"""Rows in chunks of memory, none of which is copied once there are many.

Each chunk is as large as all before it.

    chunk        0          1              2
    rows     0 .. n-1   n .. 2n-1     2n .. 4n-1

The operating system gives a chunk memory page by page, where it is first written. TensorFlow counts
all of it, and a model may have hundreds of tables: in the place of the first chunk there is a small
one, which is copied into one of eight times its size when it is full, until that has `n` rows.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from keras_psplus.tf_internals import context, resource_variable_ops

# Parts of graphs.
#
# The first step of a job takes as long as TensorFlow needs to trace a table's functions and to make
# them ready, which grows with the number of their operations, branches and captured tensors.


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
    """Function with a graph of its own, one operation in others, as it is."""
    made: list[Any] = []

    def call(*args: tf.Tensor) -> Any:
        if not made:
            with tf.init_scope():
                made.append(traced(function, *signature))
        with as_it_is():
            return made[0](*args)

    return call


@contextlib.contextmanager
def as_it_is() -> Iterator[None]:
    """Context whose calls of functions have TensorFlow not optimize their graphs.

    Grappler goes through a function again for each that calls it. That would be two fifths of what
    TensorFlow needs to make a table ready, and it finds nothing in there that makes steps faster.
    """
    own = context.context()
    options = own.function_call_options
    here = _unoptimized(options.executor_type, options.config_proto_serialized)
    own.function_call_options = here
    try:
        yield
    finally:
        # Unless others were set in there.
        if own.function_call_options is here:
            own.function_call_options = options


@functools.cache
def _unoptimized(executor_type: str | None, serialized: bytes) -> Any:
    config = tf.compat.v1.ConfigProto.FromString(serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return context.FunctionCallOptions(executor_type, config)


def places_of(mask: tf.Tensor) -> tf.Tensor:
    """int64 numbers of a vector's true elements; `tf.boolean_mask` would take 25 operations."""
    return tf.reshape(tf.where(mask), [-1])


_INT = tf.int32
_FIRST_BYTES, _LEAST_ROWS = 1 << 26, 1 << 10
# Of the first chunk, by powers of two, what there is in its place.
_SMALLER = 6, 3
MOST_ROWS = 1 << 30
_numbers = itertools.count()


class ChunkedRows:
    """Matrix that grows by rows; its methods may be called in graphs.

    Args:
        dtype: Type in which numbers are stored. Those in bfloat16 are read and written as float32.
        most: The most rows that it may have; None for `MOST_ROWS`.

    Attributes:
        dtype: Type in which numbers are read and written.
        stored: `dtype` of the argument.
    """

    def __init__(self, columns: int, dtype: tf.DType, most: int | None = None) -> None:
        self.dtype, self.stored, self._columns = _read_type(dtype), dtype, columns
        most = most or MOST_ROWS
        self.shape, self.name = tf.TensorShape([most, columns]), "rows"
        self._unique_id = f"keras_psplus_rows_{next(_numbers)}"
        first = max(_LEAST_ROWS, _FIRST_BYTES // (dtype.size * columns))
        starts, sizes = [0], [min(1 << first.bit_length() - 1, most)]
        while starts[-1] + sizes[-1] < most:
            starts.append(starts[-1] + sizes[-1])
            sizes.append(starts[-1])
        small = [rows for by in _SMALLER if (rows := sizes[0] >> by) >= _LEAST_ROWS]
        self._ends = [*small, *(start + size for start, size in zip(starts, sizes))]
        with tf.init_scope(), tf.device("/CPU:0"):
            # Of a known shape, as TensorFlow sends no other handles from one task to another.
            self._chunks = [
                resource_variable_ops.UninitializedVariable(
                    trainable=False, shape=[size, columns], dtype=dtype
                )
                for size in (*small, *sizes)
            ]
            # One tensor for functions and branches to take, instead of many.
            self._handles = tf.stack([chunk.handle for chunk in self._chunks])
            self._used = tf.Variable(0, dtype=_INT, trainable=False)
        self._read, self._write, self._make = _functions(
            dtype, columns, tuple(starts), tuple(sizes), tuple(small)
        )
        self.allocate(tf.constant(1))

    def allocate(self, rows: tf.Tensor) -> None:
        """Sees that there is memory for the rows below a number."""
        used = self._used.read_value()
        needed = 1 + tf.searchsorted(tf.constant(self._ends), rows[tf.newaxis])[0]
        # Readers of the rows read their number before.
        with tf.control_dependencies([self._make(used, needed, self._handles)]):
            self._used.assign(tf.maximum(used, needed), read_value=False)

    def sparse_read(self, rows: tf.Tensor) -> tf.Tensor:
        """Rows of an int32 vector of numbers, for which there is memory."""
        found = self._read(rows, self._used.read_value(), self._handles)
        return tf.ensure_shape(found, [None, self._columns])

    def write(self, rows: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        """Writes distinct rows, rounded to nearest; returns a tensor to wait for."""
        return self._write(rows, values, self._used.read_value(), self._handles)


def _read_type(stored: tf.DType) -> tf.DType:
    return tf.float32 if stored == tf.bfloat16 else stored


@functools.cache
def _functions(
    dtype: tf.DType,
    columns: int,
    starts: tuple[int, ...],
    sizes: tuple[int, ...],
    small: tuple[int, ...],
) -> tuple[Any, Any, Any]:
    """Functions of chunks, for all that have such chunks: read, write and make.

    TensorFlow makes a function ready when it is first executed, which takes as long as some updates
    do: of one chunk or several, it is the same.

    Args:
        starts: First row of each chunk.
        small: Rows of those that come in the place of the first one. Handles are of these and of
            the chunks, and as many of them as are used have had memory.
    """
    before, room = len(small), (*small, *sizes)
    outside = _read_type(dtype)

    def split(rows: tf.Tensor, *others: tf.Tensor) -> list[list[tf.Tensor]]:
        """Numbers of the rows in each chunk, and what belongs to them."""
        chunks = tf.searchsorted(tf.constant(starts), rows, side="right") - 1
        inside = rows - tf.gather(tf.constant(starts), chunks)
        return [tf.dynamic_partition(of, chunks, len(starts)) for of in (inside, *others)]

    def chunks_of(handles: tf.Tensor, used: tf.Tensor) -> list[tf.Tensor]:
        """Chunks that may be read: the last with memory for those without."""
        numbers = tf.minimum(tf.range(before, len(room)), used - 1)
        return tf.unstack(tf.gather(handles, numbers))

    def first(handles: tf.Tensor, used: tf.Tensor) -> tf.Tensor:
        """The first chunk, or what is in its place."""
        return tf.gather(handles, tf.minimum(used - 1, before))

    def read(rows: tf.Tensor, used: tf.Tensor, handles: tf.Tensor) -> tf.Tensor:
        def several() -> tf.Tensor:
            inside, order = split(rows, tf.range(tf.size(rows)))
            found = [
                _read_from(chunk, own, dtype, columns)
                for chunk, own in zip(chunks_of(handles, used), inside)
            ]
            return tf.dynamic_stitch(order, found)

        def one() -> tf.Tensor:
            return _read_from(first(handles, used), rows, dtype, columns)

        return tf.cast(tf.cond(used > before + 1, several, one), outside)

    def write(rows: tf.Tensor, values: tf.Tensor, used: tf.Tensor, handles: tf.Tensor) -> tf.Tensor:
        values = tf.cast(values, dtype)

        def several() -> tf.Tensor:
            parts = zip(chunks_of(handles, used), *split(rows, values))
            return tf.group([_write_to(chunk, own, part) for chunk, own, part in parts])

        is_many = used > before + 1
        tf.cond(is_many, several, lambda: _write_to(first(handles, used), rows, values))
        return tf.constant(0)

    def make(used: tf.Tensor, needed: tf.Tensor, handles: tf.Tensor) -> tf.Tensor:
        def give(i: tf.Tensor, rows: tf.Tensor) -> tf.Operation:
            # Assigned before anything reads it: afterwards, TensorFlow would copy it.
            empty = tf.raw_ops.Empty(shape=tf.stack([rows, columns]), dtype=dtype)
            return tf.raw_ops.AssignVariableOp(resource=tf.gather(handles, i), value=empty)

        def take_over(i: tf.Tensor) -> int:
            rows = tf.range(tf.gather(room, i - 1))
            values = _read_from(tf.gather(handles, i - 1), rows, dtype, columns)
            # Nobody reads rows beside an update that adds some.
            with tf.control_dependencies([_write_to(tf.gather(handles, i), rows, values)]):
                give(i - 1, tf.constant(0))
            return 0

        def make_one(i: tf.Tensor) -> tf.Tensor:
            # TensorFlow does not see that both are of the same chunk.
            with tf.control_dependencies([give(i, tf.gather(room, i))]):
                is_larger = tf.logical_and(i > 0, i <= before)
                tf.cond(is_larger, lambda: take_over(i), lambda: 0)
            return i + 1

        return tf.while_loop(lambda i: i < needed, make_one, [used], parallel_iterations=1)[0]

    number, handles = tf.TensorSpec([], _INT), tf.TensorSpec([len(room)], tf.resource)
    ids, values = tf.TensorSpec([None], _INT), tf.TensorSpec([None, columns], outside)
    return (
        traced_once(read, ids, number, handles),
        traced_once(write, ids, values, number, handles),
        traced_once(make, number, number, handles),
    )


def _read_from(handle: tf.Tensor, rows: tf.Tensor, dtype: tf.DType, columns: int) -> tf.Tensor:
    found = tf.raw_ops.ResourceGather(resource=handle, indices=rows, dtype=dtype)
    return tf.ensure_shape(found, [None, columns])


def _write_to(handle: tf.Tensor, rows: tf.Tensor, values: tf.Tensor) -> tf.Operation:
    return tf.raw_ops.ResourceScatterUpdate(resource=handle, indices=rows, updates=values)


# Rows as they were at a moment, read in parts while updates go on.
#
#     row     0 .. cursor - 1    cursor .. end
#             read               not yet: an update that is about to change one keeps the old one
#
# A row that has been updated since is known by the number of its last update.


_LONG = tf.int64
_CLOSED = _INT.max
# More than are kept until all is read.
_MOST_KEPT = 1 << 20

# Entries, as `KeyRows.entries` has them, and the rows of all columns, one beside the other.
Part: TypeAlias = tuple[np.ndarray, np.ndarray]


class _Rows(Protocol):
    """`KeyRows`."""

    next: tf.Variable
    others: list[ChunkedRows]

    def have_key(self, rows: tf.Tensor) -> tf.Tensor: ...

    def last(self, rows: tf.Tensor) -> tf.Tensor: ...

    def entries_of(self, rows: tf.Tensor) -> tf.Tensor: ...


class FrozenRows:
    """Rows that updates in a range were the last ones to change.

    `freeze`, `keep` and `read` may be called in graphs. None of them may run beside another.

    Args:
        of: `KeyRows`.
    """

    def __init__(self, of: _Rows) -> None:
        self._of = of
        with tf.init_scope(), tf.device("/CPU:0"):
            # The last one is the number of the moment.
            self._since, self._until, self._cursor, self._moment = (
                tf.Variable(value, dtype=_INT, trainable=False) for value in (-1, 0, _CLOSED, 0)
            )
            self._kept = tf.queue.FIFOQueue(_MOST_KEPT, [_INT, _LONG, tf.float32])

    def freeze(self, since: tf.Tensor, until: tf.Tensor) -> tf.Tensor:
        """Begins to keep rows, of updates after one up to the last.

        Args:
            since: The one, -1 for all.
            until: The last.

        Returns:
            The end of the rows.
        """
        self._since.assign(tf.cast(since, _INT), read_value=False)
        self._until.assign(tf.cast(until, _INT), read_value=False)
        self._cursor.assign(0, read_value=False)
        self._moment.assign_add(1, read_value=False)
        return self._of.next.read_value()

    def keep(self, rows: tf.Tensor) -> None:
        """Keeps int32 rows, about to change, that are not read yet; -1 is none."""
        cursor = self._cursor.read_value()
        tf.cond(cursor < _CLOSED, lambda: self._keep(rows, cursor), lambda: 0)

    def _keep(self, rows: tf.Tensor, cursor: tf.Tensor) -> int:
        rows = tf.gather(rows, places_of(rows >= cursor))
        rows = tf.gather(rows, places_of(self._counts(rows)))

        def put() -> int:
            self._kept.enqueue((self._moment.read_value(), *self._contents(rows)))
            return 0

        tf.cond(tf.size(rows) > 0, put, lambda: 0)
        return 0

    def read(self, first: tf.Tensor, end: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads a range of rows, the next one; returns those that count."""
        rows = tf.range(first, end)
        found = self._contents(tf.gather(rows, places_of(self._counts(rows))))
        with tf.control_dependencies(found):
            self._cursor.assign(end, read_value=False)
        return found

    def take_kept(self) -> Iterator[Part]:
        """Takes what updates have kept so far."""
        moment = int(self._moment)
        for _ in range(int(self._kept.size())):
            number, entries, values = self._kept.dequeue()
            # An update that went on while the last moment's rows were closed may have kept some.
            if number == moment:
                yield entries.numpy(), values.numpy()

    def thaw(self) -> None:
        """Keeps nothing any more."""
        self._cursor.assign(_CLOSED)
        for _ in self.take_kept():
            pass

    def _counts(self, rows: tf.Tensor) -> tf.Tensor:
        last = self._of.last(rows)
        is_in_range = tf.logical_and(last > self._since, last <= self._until)
        return tf.logical_and(is_in_range, self._of.have_key(rows))

    def _contents(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        columns = [column.sparse_read(rows) for column in self._of.others]
        values = tf.concat(columns, 1) if columns else tf.zeros([tf.size(rows), 0])
        return self._of.entries_of(rows), values
