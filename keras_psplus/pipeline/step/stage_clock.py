"""Moments of the stages' actions, read by the workers' clocks in a step's graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import tensorflow as tf

from keras_psplus.core.batch.replica_step import time_after
from keras_psplus.keras_internals.keras_parts import tree
from keras_psplus.pipeline.base.schedule import Action, Span
from keras_psplus.pipeline.base.stages import host_of
from keras_psplus.tf_internals import framework_ops as ops


@dataclasses.dataclass(eq=False)
class Segment:
    """Calls of an action's layers, each with the results of those before.

    Attributes:
        action: Direction and number of the micro-batch.
        given: Tensors that the first of them begins with.
        after: Actions that it waits for.
        sent: Tensors that other stages may need.
        ends: Tensors that are computed last.
    """

    action: Action
    given: list[tf.Tensor]
    after: set[Action] = dataclasses.field(default_factory=set)
    sent: list[tf.Tensor] = dataclasses.field(default_factory=list)
    ends: list[tf.Tensor] = dataclasses.field(default_factory=list)


class StageClock:
    """Clock of one traced step.

    Each call of the step returns the moments of all workers, in one tensor of the chief.

    Args:
        number: Number that tells the clock from those of other traces.
        devices: Names of the workers' devices.
        host: Name of the chief's device.
    """

    def __init__(self, number: int, devices: list[str], host: str) -> None:
        self._number, self._devices, self._host = number, devices, host
        self._graph: tf.Graph | None = tf.compat.v1.get_default_graph()
        self._segments: list[list[Segment]] = [[] for _ in devices]
        # By the names of what they have made.
        self._made: list[dict[str, Segment]] = [{} for _ in devices]

    def begin(self, worker: int, action: Action, given: Any) -> Segment | None:
        """Notes the tensors that layers of an action begin with.

        Returns:
            The `Segment` that they belong to; None in a branch or a loop.
        """
        if tf.compat.v1.get_default_graph() is not self._graph:
            return None
        made = self._made[worker]
        leaves = [leaf for leaf in tree.flatten(given) if _is_number(leaf)]
        before = [made.get(leaf.name) for leaf in leaves]
        own = [one for one in before if one is not None and one.action == action]
        if own and len(own) == len(leaves):
            return max(own, key=self._segments[worker].index)
        outside = [leaf for leaf, one in zip(leaves, before) if one not in own]
        return Segment(action, outside)

    def end(
        self, segment: Segment, worker: int, tensors: list[tf.Tensor], sent: list[tf.Tensor]
    ) -> None:
        """Notes what layers have computed last, and what other stages may need of it."""
        if segment not in self._segments[worker]:
            self._segments[worker].append(segment)
        segment.ends += tensors
        segment.sent = list(sent)
        self._made[worker].update((tensor.name, segment) for tensor in [*tensors, *sent])

    def moments(self, run: Collection[tf.Operation]) -> tf.Tensor | None:
        """A vector of all moments, or None if there are none.

        Args:
            run: The operations that are run. What is computed for nobody is not waited for, such as
                gradients by the batch.
        """
        parts = []
        for worker, device in enumerate(self._devices):
            for segment in self._segments[worker]:
                for tensors in (segment.given, segment.sent, segment.ends):
                    tensors[:] = [one for one in tensors if one.op in run]
            kept = [one for one in self._segments[worker] if one.given and one.ends]
            self._segments[worker] = kept
            with ops.control_dependencies(None):
                parts += [_moments_of(device, kept)] if kept else []
            for segment in kept:
                # They would keep the graph.
                segment.given, segment.sent, segment.ends = [], [], []
        self._graph, self._made = None, []
        if not parts:
            return None
        with ops.control_dependencies(None), ops.device(self._host):
            return tf.concat([tf.constant([self._number], tf.float64), *parts], 0)

    def spans(self, moments: list[float]) -> list[list[Span]]:
        """For each worker, the spans of a step that has returned some moments."""
        found, place = [], 1
        for segments in self._segments:
            count = len(segments)
            rows = [moments[place + i * count : place + (i + 1) * count] for i in range(3)]
            place += 3 * count + 1 if segments else 0
            found.append(
                [
                    Span(segment.action, arrived, sent, ended, frozenset(segment.after))
                    for segment, arrived, sent, ended in zip(segments, *rows)
                ]
            )
        return found


def _moments_of(device: str, segments: list[Segment]) -> tf.Tensor:
    """Moments at which a worker's segments could begin, could send, and had ended."""
    seen = []
    for segment in segments:
        with ops.device(device):
            # An edge without data would show that it was sent, not that it has come.
            seen.append([tf.cast(tf.reshape(one, [-1])[:1], tf.float64) for one in segment.given])
    with ops.device(host_of(device)):
        arrived = [time_after(one) for one in seen]
        sent = [time_after(segment.sent or segment.ends) for segment in segments]
        ended = [time_after(segment.ends) for segment in segments]
        # TensorFlow takes out what nothing is computed of.
        used = tf.reduce_sum(tf.concat([one for of_segment in seen for one in of_segment], 0))
        return tf.stack([*arrived, *sent, *ended, used])


def _is_number(leaf: Any) -> bool:
    if not isinstance(leaf, tf.Tensor):
        return False
    return bool(leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool)
