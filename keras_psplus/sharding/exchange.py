"""Exchange of an optimizer's gradients and new values between the workers that share its state.

With a compressor, a worker adds up the decoded rows of all, in float32. Of new values, changes are
sent: all workers, also the one whose part it is, add the decoded change to the old value, so that
weights stay equal, and what a change leaves out is in the next one (error feedback).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.all_reduce.collectives import gradients
from keras_psplus.all_reduce.reduction import row_routes
from keras_psplus.all_reduce.reduction.compressors import check_rows
from keras_psplus.all_reduce.topology import group_routes, shards
from keras_psplus.compression import Compressor, ErrorFeedback
from keras_psplus.compression.methods import without_feedback
from keras_psplus.core.batch.traffic import TensorTraffic, TrafficVariables
from keras_psplus.sharding.variable import ParameterPart, gather_row

if TYPE_CHECKING:
    from keras_psplus.all_reduce.collectives.operations import Launcher
    from keras_psplus.all_reduce.reduction.replica_states import ReplicaStates
    from keras_psplus.engine import Variables

# Buckets whose copies are in memory at once; the next one is on its way while one is summed.
_UNDER_WAY = 2


class PartExchange:
    """Exchanges of flat parts of one optimizer's variables, and their costs.

    Args:
        launcher: Collectives of this worker's replica.
        rank: Place of this worker among those that share.
        workers: Number of those.
        bucket_bytes: Size in bytes at which a bucket is sent.
        compressors: Of gradients, and of the new values' changes; or None.
        states: `ReplicaStates` of the compressors.
        between: Collectives between the workers of several groups that have the same parts; None
            if one group has all workers.
    """

    def __init__(
        self,
        launcher: Launcher,
        rank: int,
        workers: int,
        bucket_bytes: int,
        compressors: tuple[Compressor | None, Compressor | None],
        states: ReplicaStates,
        between: Launcher | None = None,
    ) -> None:
        self._between = between
        self._launcher, self._rank, self._workers = launcher, rank, workers
        self._bucket_bytes, self._states = bucket_bytes, states
        self._of_gradients, self._of_changes = compressors
        self.traffic = TrafficVariables()

    def scatter(
        self,
        tensors: Sequence[tf.Tensor],
        variables: Variables,
        cuts: Sequence[shards.Cut],
        numbers: Sequence[int],
        step: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Sums gradients over the workers; each receives its flat part of every sum.

        Args:
            tensors: Gradients of static shapes.
            variables: Their Keras variables.
            cuts: Their layouts.
            numbers: Numbers of the variables, the same in each step.
            step: int64 scalar, the same on all workers.
        """
        parts: list[Any] = [None] * len(tensors)
        compressors = [compressor_of(self._of_gradients, v) for v in variables]
        sent, done = list[tf.Tensor](), list[tf.Tensor]()
        for own in self._buckets(tensors, compressors, cuts):
            compressor, of_own = compressors[own[0]], [cuts[i] for i in own]
            with _behind(done):
                rows = shards.rows_of([tensors[i] for i in own], of_own)
            if compressor is None:
                row = group_routes.scatter(self._launcher, rows)
            else:
                # Processors that encode this before the last is on its way leave the link idle.
                rows = gradients.after(sent, tf.cast(rows, tf.float32))
                row, words = self._scatter(compressor, rows, [numbers[i] for i in own], step)
                sent = [words]
            (row,) = self.sum_between([row])
            done.append(row)
            for i, part in zip(own, shards.shards_of(row, of_own)):
                parts[i] = tf.cast(part, tensors[i].dtype)
        self.count(variables, [cut.width for cut in cuts], compressors)
        self.traffic.time(tensors, parts)
        return parts

    def gather(
        self, parts: Sequence[ParameterPart], numbers: Sequence[int], step: tf.Tensor
    ) -> None:
        """Gives mirrored variables what the workers have made of their parts.

        Args:
            parts: This worker's parts.
            numbers: Numbers of their variables, the same in each step.
            step: int64 scalar, the same on all workers.
        """
        variables, cuts = [part.variable for part in parts], [part.cut for part in parts]
        compressors = [compressor_of(self._of_changes, variable) for variable in variables]
        done: list[tf.Tensor] = []
        for own in self._buckets(parts, compressors, cuts):
            compressor, of_own = compressors[own[0]], [cuts[i] for i in own]
            with _behind(done):
                if compressor is None:
                    row = shards.row_of([parts[i].value() for i in own])
                    rows = gather_row(self._launcher, row, self._workers)
                else:
                    row = shards.row_of([parts[i].change() for i in own])
                    rows = self._gather(compressor, row, [numbers[i] for i in own], step)
            wholes = shards.wholes_of(rows, of_own)
            done.append(wholes[-1])
            for i, whole in zip(own, wholes):
                value = variables[i]._value
                assign = value.assign if compressor is None else value.assign_add
                assign(tf.cast(whole, value.dtype), read_value=False)
        self.count(variables, [cut.width for cut in cuts], compressors, is_gradient=False)

    def sum_between(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums of a group's sums over the groups."""
        return gradients.sum_packed(self._between, tensors) if self._between else tensors

    def count(
        self,
        variables: Variables,
        widths: Sequence[int],
        compressors: Sequence[Compressor | None] | None = None,
        is_gradient: bool = True,
    ) -> None:
        """Counts so many elements of each variable for each of the other workers."""
        entries = entries_of(variables, widths, compressors, self._workers, is_gradient)
        if self._between and is_gradient:
            # One part of each variable, in a ring of the groups.
            groups = self._between._group_size
            for i, (variable, width) in enumerate(zip(variables, widths)):
                size = width * tf.as_dtype(variable.dtype).size
                more = round(2 * (groups - 1) / groups * size)
                entries[i] = entries[i]._replace(wire=entries[i].wire + more, between=more)
        self.traffic.add(entries)

    def _buckets(
        self,
        items: Sequence[Any],
        compressors: Sequence[Compressor | None],
        cuts: Sequence[shards.Cut],
    ) -> list[list[int]]:
        """Numbers of items of one dtype and compressor, from the last layer back."""
        # As backprop makes gradients ready.
        found = gradients.buckets(
            reversed(range(len(items))),
            lambda i: (items[i].dtype, id(compressors[i])),
            lambda i: cuts[i].number * cuts[i].width * items[i].dtype.size,
            self._bucket_bytes,
        )
        return [numbers for _, numbers in found]

    def _scatter(
        self, compressor: Compressor, rows: tf.Tensor, numbers: Sequence[int], step: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        name, state = self._read("scatter", compressor, rows, numbers)
        row, words, payload, keep = row_routes.scatter_row(
            self._launcher, self._workers, compressor, rows, state, step
        )
        inner = without_feedback(compressor)
        if inner is not compressor:

            def own() -> tf.Tensor:
                return inner.decode_rows(payload, (rows.shape[1],), tf.float32, step)

            self._states.write(name, keep(own))
        return row, words

    def _gather(
        self, compressor: Compressor, row: tf.Tensor, numbers: Sequence[int], step: tf.Tensor
    ) -> tf.Tensor:
        name, state = self._read("gather", compressor, row, numbers)
        rows, _, keep = row_routes.gather_row(
            self._launcher, self._rank, self._workers, compressor, row, state, step
        )
        if isinstance(compressor, ErrorFeedback):
            self._states.write(name, keep())
        return rows

    def _read(
        self, route: str, compressor: Compressor, rows: tf.Tensor, numbers: Sequence[int]
    ) -> tuple[str, Any]:
        """Name and value of a bucket's state, which another number of workers cannot use."""
        name = f"{route} {zlib.crc32(repr(list(numbers)).encode()):08x} of {self._workers}"
        if not isinstance(compressor, ErrorFeedback):
            return name, ()
        return name, self._states.read(name, lambda: compressor.init(rows.shape, tf.float32))


def _behind(done: Sequence[tf.Tensor]) -> AbstractContextManager[Any]:
    """Context of a bucket's operations, which wait until few buckets are under way.

    Gradients are ready long before a slow link has sent them: their copies would all be in memory.
    """
    return tf.control_dependencies(done[-_UNDER_WAY : 1 - _UNDER_WAY])


def compressor_of(chooser: Compressor | None, variable: Any) -> Compressor | None:
    """The compressor of a variable's parts, or None."""
    if chooser is None:
        return None
    chosen = chooser.for_variable(variable.path, variable.shape, variable.dtype)
    return None if chosen is None else check_rows(chosen)


def entries_of(
    variables: Sequence[Any],
    widths: Sequence[int],
    compressors: Sequence[Compressor | None] | None,
    workers: int,
    is_gradient: bool,
) -> list[TensorTraffic]:
    """Costs of so many elements of each variable for each of the other workers."""
    entries = []
    for i, (variable, width) in enumerate(zip(variables, widths)):
        dtype, compressor = tf.as_dtype(variable.dtype), compressors and compressors[i]
        size = whole = math.prod(variable.shape) * dtype.size
        each, name = width * dtype.size, None
        if compressor:
            size = compressor.wire_bytes(tuple(variable.shape), dtype)
            each, name = compressor.row_bytes((width,), dtype), repr(compressor)
        whole, size = (whole, size) if is_gradient else (0, 0)
        entries.append(TensorTraffic(variable.path, name, whole, size, (workers - 1) * each))
    return entries
