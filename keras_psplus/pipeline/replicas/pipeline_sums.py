"""Gradient sums over pipelines, and copies of weights, while a step is traced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.pipeline.base import gradients
from keras_psplus.pipeline.replicas.copies import Copied, Copies, Reads
from keras_psplus.tf_internals import framework_ops as ops
from keras_psplus.tf_internals import record, resource_variable_ops


class TraceAgain(Exception):
    """A trace has shown that it should have read another copy of a variable."""


@dataclasses.dataclass(eq=False)
class ReplicaTransfer:
    """A gradient on its way from one pipeline to another, which has the primary.

    Attributes:
        copied: The variable.
        pipeline: Number of the pipeline that it comes from.
        sent: Sum over the micro-batches of that pipeline.
        arrived: The same, on the primary's device: tensors that are identities of those of `sent`.
    """

    copied: Copied
    pipeline: int
    sent: tf.Tensor | tf.IndexedSlices
    arrived: tf.Tensor | tf.IndexedSlices


class PipelineSums:
    """Communication between the pipelines of a step.

    Each sums the gradients of its micro-batches on its devices. One tensor for each variable
    crosses to the variable's primary.

    Args:
        trains: Whether weights may change in this step, or have changed since the one before.

    Attributes:
        crossings: List of the `ReplicaTransfer`s that were traced.
    """

    def __init__(self, copies: Copies, trains: bool) -> None:
        self._copies, self._pipelines = copies, copies.pipelines
        self._trains, self._graph = trains, tf.compat.v1.get_default_graph()
        # By ids of primaries: those whose copies have their values, and those that are frozen.
        self._fresh: set[int] = set()
        self._frozen: set[int] = set()
        self._must_trace_again = False
        self.crossings: list[ReplicaTransfer] = []

    def reads(self, layer: keras.Layer) -> list[Reads]:
        """For each pipeline, a context in which a layer's weights are the pipeline's copies."""
        found = self._copies.of_layer(layer)
        for copied in found if self._trains else ():
            self._refresh(copied)
            _note_copies(copied)
        return [Reads(found, pipeline) for pipeline in range(self._pipelines)]

    def _refresh(self, copied: Copied) -> None:
        key = id(copied.primary)
        if key in self._fresh or key in self._frozen:
            return
        variable = copied.variable()
        if not copied.changes and variable is not None and not variable._trainable:
            self._frozen.add(key)  # It would travel at each step, and is always the same.
            return
        copied.refresh()
        # A branch that is not taken gives no values.
        if tf.compat.v1.get_default_graph() is self._graph:
            self._fresh.add(key)

    def note_changed(self, copied: Copied, in_microbatch: bool) -> None:
        """Notes that the step gives a primary a value."""
        key = id(copied.primary)
        self._fresh.discard(key)
        if in_microbatch and not copied.is_state:
            copied.is_state = self._must_trace_again = True
        if key in self._frozen:
            copied.changes = self._must_trace_again = True

    def check(self) -> None:
        """Raises `TraceAgain` if a variable changes that was taken for one that does not."""
        if self._must_trace_again:
            raise TraceAgain

    def of_variables(
        self, variables: list[tf.Variable]
    ) -> tuple[list[tf.Variable], Callable[[list[Any]], list[Any]]]:
        """Primaries of variables, and a function that maps gradients by them.

        For `gradients.JoinedCalls`.
        """
        found = [self._copies.find(variable) for variable in variables]
        primaries = {}
        for variable, known in zip(variables, found):
            primary = variable if known is None else known[0].primary
            primaries[id(primary)] = primary
        for primary in primaries.values():
            # The tapes outside have perhaps seen copies alone.
            if any(primary is not variable for variable in variables):
                resource_variable_ops.variable_accessed(primary)

        def total(sums: Sequence[Any]) -> list[Any]:
            parts: dict[int, dict[int, Any]] = {}
            for variable, known, gradient in zip(variables, found, sums):
                if known is None:
                    parts[id(variable)] = {0: gradient}
                else:
                    copied, pipeline = known
                    parts.setdefault(id(copied.primary), {})[pipeline] = gradient
            return [self._total(primary, parts[key]) for key, primary in primaries.items()]

        return list(primaries.values()), total

    def total(self, weights: list[keras.Variable], sums: dict[int, list[Any]]) -> list[Any]:
        """Gradients of the batch.

        Args:
            sums: Dict from pipelines to lists of the gradients of their micro-batches.
        """
        return [
            self._total(weight._value, {pipeline: own[i] for pipeline, own in sums.items()})
            for i, weight in enumerate(weights)
        ]

    def _total(self, primary: tf.Variable, parts: dict[int, Any]) -> Any:
        """The sum of the gradients of some pipelines, on the device of the primary."""
        if len(parts) == 1 and self._pipelines == 1:
            return next(iter(parts.values()))
        copied, home = self._copies.find(primary) or (None, 0)
        total = parts.get(home)
        with ops.device(primary.device):
            for pipeline, gradient in parts.items():
                if pipeline == home or gradient is None:
                    continue
                if copied is not None and not copied.is_state:
                    arrived = tf.nest.map_structure(tf.identity, gradient, expand_composites=True)
                    self.crossings.append(ReplicaTransfer(copied, pipeline, gradient, arrived))
                    gradient = arrived
                total = gradients.add(total, gradient)
        return total


def _note_copies(copied: Copied) -> None:
    """Lets gradients of gradients, which tapes outside compute by copies, count for the primary."""
    resource_variable_ops.variable_accessed(copied.primary)
    for copy in copied.copies.values():
        record.record_operation(
            "CopyOfWeight", [copy.handle], [copied.primary.handle], lambda gradient: [gradient]
        )
