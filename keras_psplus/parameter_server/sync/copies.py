"""Copies that overlapping steps need: weights on workers, and values to undo an update.

A worker's function of a step reads its copies. As soon as a variable's update is made on its
server, which is when the gradients of all workers for it have arrived there, the new value is sent
to the copies for the next step, while other gradients are still being sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_psplus.parameter_server.context import StepContext
from keras_psplus.parameter_server.state import WorkerVariable
from keras_psplus.parameter_server.tracing.traffic import CountedFunction, counted
from keras_psplus.parameter_server.transport import reads
from keras_psplus.parameter_server.transport.pulls import Pulls, WholeRead
from keras_psplus.tf_internals import framework_ops as ops


class _Part(NamedTuple):
    """A variable or a shard, of which there are copies."""

    variable: tf.Variable
    read: WholeRead
    name: str


class WorkerCopies:
    """Copies of the variables that a step reads whole."""

    def __init__(self, context: StepContext, whole_reads: Sequence[WholeRead]) -> None:
        self._context, self._states = context, context.extended.worker_states
        self._reads = whole_reads
        self._parts = {
            id(part): _Part(part, read, f"copies/{part._unique_id}")
            for read in whole_reads
            for part in read.parts
        }
        parts = list(self._parts.values())
        groups = reads.groups([part.variable for part in parts])
        self._groups = [[parts[place] for place in places] for places in groups]
        forms = {part.name: (part.variable.shape, part.variable.dtype) for part in parts}
        self._states.register(forms, are_saved=False)

    def keep_in(self, pulls: Pulls) -> None:
        """Has the function that is being traced read the copies, before anything else."""
        for read in self._reads:
            values = [self._copy(self._parts[id(part)]).read_value() for part in read.parts]
            value = values[0] if len(values) == 1 else tf.concat(values, 0)
            pulls.keep(read.variable, read.parts, value)

    def _copy(self, part: _Part) -> WorkerVariable:
        form = part.variable.shape, part.variable.dtype
        return WorkerVariable(self._states.handle(part.name, *form), *form)

    def announce(self, readers: tf.Tensor, generation: int) -> None:
        """Lets so many workers read what the function that is being traced has updated.

        No functions share the generation of those that read.
        """
        for number, group in enumerate(self._groups):
            # Out here: a function makes its handles in order, and would wait for values in between.
            queue = self._queue(number, generation)
            with tf.device(group[0].variable.device):
                # After their updates, in the order of the function.
                values = [reads.raw_read(part.variable) for part in group]
                with tf.control_dependencies(values):
                    tf.raw_ops.QueueEnqueueManyV2(
                        handle=queue, components=[tf.zeros([readers], tf.int32)]
                    )

    def trace_fetch(self, generation: int) -> CountedFunction:
        """A function of a worker that brings each copy once it may be read."""

        def fetch() -> None:
            for number, group in enumerate(self._groups):
                self._fetch(group, self._queue(number, generation))

        return counted(self._context.strategy, fetch)

    def _fetch(self, group: list[_Part], queue: tf.Tensor) -> None:
        with tf.device(group[0].variable.device):
            token = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int32])
        variables = [part.variable for part in group]
        compressors = [part.read.compressor for part in group]
        keys = [reads.key_of(part.read.variable, part.read.compressor) for part in group]
        with ops.control_dependencies([token[0].op]):
            values = reads.read_together(variables, compressors, keys)
        for part, value in zip(group, values):
            self._copy(part).assign(value)

    def _queue(self, number: int, generation: int) -> tf.Tensor:
        """Queue on a group's server, with a token for each worker yet to read it."""
        with tf.device(self._groups[number][0].variable.device):
            return tf.raw_ops.FIFOQueueV2(
                component_types=[tf.int32],
                shapes=[[]],
                shared_name=f"{self._states.prefix}/updated/{generation}/{number}",
            )


class Undo:
    """Keeps the values of variables until the next update, on their parameter servers.

    A value and what is kept of it share their memory until an update writes to the variable: the
    servers have twice the bytes of these variables then. `on_chief` makes a call of the chief out
    of a function that is traced.
    """

    def __init__(
        self,
        parts: Sequence[tf.Variable],
        prefix: str,
        on_chief: Callable[[Callable[[], Any]], Callable[[], Any]],
    ) -> None:
        self.handles = {id(part.handle) for part in parts}
        self._parts, self._prefix = parts, prefix
        self.keep, self.restore = on_chief(self._keep), on_chief(self._restore)

    def _keep(self) -> tf.Tensor:
        for part in self._parts:
            with tf.device(part.device):
                tf.raw_ops.AssignVariableOp(resource=self._kept(part), value=reads.raw_read(part))
        return tf.constant(True)

    def _restore(self) -> tf.Tensor:
        for part in self._parts:
            with tf.device(part.device):
                value = tf.raw_ops.ReadVariableOp(resource=self._kept(part), dtype=part.dtype)
                tf.raw_ops.AssignVariableOp(resource=part.handle, value=value)
        return tf.constant(True)

    def _kept(self, part: tf.Variable) -> tf.Tensor:
        name = f"{self._prefix}/before/{part._unique_id}"
        return tf.raw_ops.VarHandleOp(shape=part.shape, dtype=part.dtype, shared_name=name)
