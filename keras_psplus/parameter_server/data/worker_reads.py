"""Reads of a dataset's next batches on a worker, several in one message.

Batches stay on the worker. Each operation there costs the chief half a millisecond of processor
time, so that ten batches read one by one cost more than the ten steps on them. Batches that cannot
be joined are read one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_psplus.parameter_server.tracing.joined_batches import Batches, JoinedBatches
from keras_psplus.parameter_server.tracing.remote import on_worker
from keras_psplus.tf_internals import data_structure as structure


class WorkerReads:
    """Reads of a dataset's batches, of which several may be joined if they fit."""

    def __init__(self, element_spec: Any, joins: bool) -> None:
        self._spec = element_spec
        self._types = structure.get_flat_tensor_types(element_spec)
        self._shapes = structure.get_flat_tensor_shapes(element_spec)
        self._joins = joins and fit_end_to_end(element_spec)
        # The function and what it is traced from, which TensorFlow holds weakly.
        self._functions: dict[int, tuple[Any, Any]] = {}

    def take(self, iterator: tf.data.Iterator, worker: int, count: int) -> Batches:
        """Takes batches into a worker's memory; fewer at the end of the data."""
        if count == 1 or not self._joins:
            return self._take_one_by_one(iterator, worker, count)
        if count not in self._functions:
            self._functions[count] = self._trace(count)
        with on_worker(worker):
            *whole, rows = self._functions[count][0](iterator._iterator_resource)
        # The shape comes with the worker's answer; a value would have to be asked for.
        if not rows.shape[1]:
            return []
        return JoinedBatches(tf.nest.pack_sequence_as(self._spec, whole), rows)

    def _take_one_by_one(self, iterator: tf.data.Iterator, worker: int, count: int) -> list[Any]:
        batches = []
        with on_worker(worker):
            for _ in range(count):
                try:
                    # Python's `next` would leave the end of the data behind in an executor of its
                    # own.
                    flat = tf.raw_ops.IteratorGetNext(
                        iterator=iterator._iterator_resource,
                        output_types=self._types,
                        output_shapes=self._shapes,
                    )
                except tf.errors.OutOfRangeError:
                    break
                batches.append(structure.from_compatible_tensor_list(self._spec, flat))
        return batches

    def _trace(self, count: int) -> tuple[Any, Any]:
        def take(iterator: tf.Tensor) -> tuple[tf.Tensor, ...]:
            taken = [self._next_or_nothing(iterator) for _ in range(count)]
            whole = [tf.concat(parts, 0) for parts in zip(*(leaves for leaves, _ in taken))]
            rows = tf.transpose(
                [[tf.shape(leaf, tf.int64)[0] for leaf in leaves] for leaves, _ in taken]
            )
            # At the end of the data what is missing comes last.
            found = tf.reduce_sum([tf.cast(is_there, tf.int32) for _, is_there in taken])
            return *whole, rows[:, :found]

        function = tf.function(take, autograph=False)
        return function.get_concrete_function(tf.TensorSpec([], tf.resource)), function

    def _next_or_nothing(self, iterator: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        types, shapes = self._types, self._shapes
        optional = tf.raw_ops.IteratorGetNextAsOptional(
            iterator=iterator, output_types=types, output_shapes=shapes
        )
        is_there = tf.raw_ops.OptionalHasValue(optional=optional)
        leaves = tf.cond(
            is_there,
            lambda: tf.raw_ops.OptionalGetValue(
                optional=optional, output_types=types, output_shapes=shapes
            ),
            functools.partial(_no_rows, types, shapes),
        )
        return leaves, is_there


def fit_end_to_end(element_spec: Any) -> bool:
    """Whether all batches of a type specification can be joined: what is not dense cannot."""
    specs = tf.nest.flatten(element_spec)
    return bool(specs) and all(type(s) is tf.TensorSpec and _has_rows(s.shape) for s in specs)


def _has_rows(shape: tf.TensorShape) -> bool:
    return bool(shape.rank) and shape[1:].is_fully_defined()


def _no_rows(types: Iterable[tf.DType], shapes: Iterable[tf.TensorShape]) -> list[tf.Tensor]:
    return [tf.zeros([0, *shape[1:]], dtype) for dtype, shape in zip(types, shapes)]
