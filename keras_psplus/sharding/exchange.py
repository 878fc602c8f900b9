"""Exchange of an optimizer's gradients and new values between the workers that share its state.

With a compressor, a worker adds up the decoded rows of all, in float32. Of new values, changes are
sent: all workers, also the one whose part it is, add the decoded change to the old value, so that
weights stay equal, and what a change leaves out is in the next one (error feedback).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.all_reduce.collectives.hop import (
    Coding,
    Cut,
    Hop,
    HopOrder,
    Route,
    buckets,
    row_of,
    rows_of,
    shards_of,
    wholes_of,
)
from keras_psplus.all_reduce.reducers import RingSum
from keras_psplus.all_reduce.reduction.methods import bucket_key, check_rows, cost_of
from keras_psplus.compression import Compressor
from keras_psplus.core.batch.replica_step import TensorTraffic, TrafficVariables
from keras_psplus.sharding.variable import ParameterPart
from keras_psplus.tf_internals import framework_ops

if TYPE_CHECKING:
    from keras_psplus.all_reduce.reduction.replica_states import ReplicaStates
    from keras_psplus.engine import Variables


class PartExchange:
    """Exchanges of flat parts of one optimizer's variables, and their costs.

    Args:
        route: Way of rows between the workers that share.
        compressors: Of gradients, and of the new values' changes; or None.
        between: Hop between the workers of several groups that have the same parts, where gradients
            are compressed then; None if one group has all workers.
    """

    def __init__(
        self,
        route: Route,
        bucket_bytes: int,
        compressors: tuple[Compressor | None, Compressor | None],
        states: ReplicaStates,
        between: Hop | None = None,
    ) -> None:
        self._between: RingSum | None = None
        self._route, self._bucket_bytes, self._states = route, bucket_bytes, states
        self._of_gradients, self._of_changes = compressors
        if between is not None:
            own = states.within("between")
            self._between = RingSum(between, self._of_gradients, bucket_bytes, False, own)
            self._of_gradients = None
        self.traffic = TrafficVariables()
        # Of the last bucket of gradients.
        self._scattered: tf.Tensor | None = None

    def scatter(
        self,
        tensors: Sequence[tf.Tensor],
        variables: Variables,
        cuts: Sequence[Cut],
        numbers: Sequence[int],
        step: tf.Tensor,
    ) -> list[tf.Tensor]:
        """Sums gradients over the workers; each receives its flat part of every sum.

        Args:
            tensors: Gradients of static shapes.
            numbers: Numbers of the variables, the same in each step.
            step: int64 scalar, the same on all workers.
        """
        parts: list[Any] = [None] * len(tensors)
        compressors = [compressor_of(self._of_gradients, v) for v in variables]
        sent, order = list[tf.Tensor](), HopOrder()
        for own in self._buckets(tensors, compressors, cuts):
            compressor, of_own = compressors[own[0]], [cuts[i] for i in own]
            with order.waiting():
                rows = rows_of([tensors[i] for i in own], of_own)
            coding = self._coding("scatter", compressor, [numbers[i] for i in own], step)
            # Processors that encode this before the last is on its way leave the link idle.
            row = self._route.scatter(rows, coding, sent)
            if coding is not None:
                coding.keep()
                sent = [coding.words]
            order.end([row])
            self._scattered = row
            found = shards_of(row, of_own)
            for i, part in zip(own, self.sum_between(found, [variables[i] for i in own], step)):
                parts[i] = tf.cast(part, tensors[i].dtype)
        self.count(variables, [cut.width for cut in cuts], compressors)
        self.traffic.time(tensors, parts)
        return parts

    def gather(
        self, parts: Sequence[ParameterPart], numbers: Sequence[int], step: tf.Tensor
    ) -> None:
        """Gives mirrored variables what the workers have made of their parts."""
        variables, cuts = [part.of for part in parts], [part.cut for part in parts]
        compressors = [compressor_of(self._of_changes, variable) for variable in variables]
        order = HopOrder()
        for own in self._buckets(parts, compressors, cuts):
            compressor, of_own = compressors[own[0]], [parts[i] for i in own]
            with order.waiting(), self._after_scatter():
                coding = self._coding("gather", compressor, [numbers[i] for i in own], step)
                row = row_of([p.value() if coding is None else p.change() for p in of_own])
                rows = self._route.gather(row, coding, of_own[0].dtype)
            wholes = wholes_of(rows, [part.cut for part in of_own])
            order.end([wholes[-1]])
            for i, whole in zip(own, wholes):
                value = variables[i]._value
                assign = value.assign if compressor is None else value.assign_add
                assign(tf.cast(whole, value.dtype), read_value=False)
        self.count(variables, [cut.width for cut in cuts], compressors, is_gradient=False)

    def _after_scatter(self) -> AbstractContextManager[Any]:
        """Context of gathers, which wait for all gradients of their step.

        On one link they would hold those up, and gradients take as much memory as all parts.
        """
        last = self._scattered
        # Eager tensors are of no graph.
        is_here = getattr(last, "graph", None) is framework_ops.get_default_graph()
        return tf.control_dependencies([last] if is_here else [])

    def sum_between(
        self, tensors: list[tf.Tensor], variables: Variables, step: tf.Tensor
    ) -> list[tf.Tensor]:
        """Sums of a group's sums over the groups, and what they cost."""
        if self._between is None:
            return tensors
        sums, entries = self._between.sum_and_count(tensors, variables, step)
        self.traffic.add([e._replace(logical=0, compressed=0, between=e.wire) for e in entries])
        return sums

    def count(
        self,
        variables: Variables,
        widths: Sequence[int],
        compressors: Sequence[Compressor | None] | None = None,
        is_gradient: bool = True,
        route: Route | None = None,
    ) -> None:
        """Counts so many elements of each variable for each of the other workers."""
        entries = entries_of(variables, widths, compressors, route or self._route, is_gradient)
        self.traffic.add(entries)

    def _buckets(
        self,
        items: Sequence[Any],
        compressors: Sequence[Compressor | None],
        cuts: Sequence[Cut],
    ) -> list[list[int]]:
        """Numbers of items of one dtype and compressor, from the last layer back."""
        # As backprop makes gradients ready.
        found = buckets(
            reversed(range(len(items))),
            lambda i: (items[i].dtype, id(compressors[i])),
            lambda i: cuts[i].number * cuts[i].width * items[i].dtype.size,
            self._bucket_bytes,
        )
        return [numbers for _, numbers in found]

    def _coding(
        self, way: str, compressor: Compressor | None, numbers: Sequence[int], step: tf.Tensor
    ) -> Coding | None:
        """Coding of a bucket, whose state another number of workers cannot use."""
        if compressor is None:
            return None
        name = f"{way} {bucket_key(numbers)} of {self._route.last.size}"
        if self._route.group_size > 1:
            name += f" of {self._route.workers}"
        return Coding(compressor, step, self._states, name)


def compressor_of(chooser: Compressor | None, variable: Any) -> Compressor | None:
    if chooser is None:
        return None
    chosen = chooser.for_variable(variable.path, variable.shape, variable.dtype)
    return None if chosen is None else check_rows(chosen)


def entries_of(
    variables: Sequence[Any],
    widths: Sequence[int],
    compressors: Sequence[Compressor | None] | None,
    route: Route,
    is_gradient: bool,
) -> list[TensorTraffic]:
    """Costs of so many elements of each variable for each of the other workers."""
    entries = []
    size, inside = route.last.size, route.group_size - 1
    for i, (variable, width) in enumerate(zip(variables, widths)):
        dtype, compressor = tf.as_dtype(variable.dtype), compressors[i] if compressors else None
        sent = whole = math.prod(variable.shape) * dtype.size
        each = plain = width * dtype.size
        if compressor is not None:
            sent = compressor.wire_bytes(tuple(variable.shape), dtype)
            each = compressor.row_bytes((width,), dtype)
        whole, sent = (whole, sent) if is_gradient else (0, 0)
        last = (size - 1) * each
        wire, between = last + inside * size * plain, last if inside else 0
        entries.append(cost_of(variable.path, compressor, whole, sent, wire, between))
    return entries
