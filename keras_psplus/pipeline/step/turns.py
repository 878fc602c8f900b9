"""Micro-batches, and the actions of a stage on one of them in one direction."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

import tensorflow as tf

from keras_psplus.pipeline.base import schedule
from keras_psplus.pipeline.base.stages import Stages
from keras_psplus.pipeline.replicas import Reads
from keras_psplus.pipeline.step.stage_clock import Segment, StageClock


class TurnStep(Protocol):
    """Step while it is traced, as its micro-batches and actions see it: a `PipelineStep`."""

    stages: Stages
    part: Microbatch | None
    activations: list[tf.Tensor]
    traced: list[schedule.Actions]
    done: list[dict[tuple[str, int], list[tf.Tensor]]]
    before: list[dict[tuple[str, int], list[tuple[str, int]]]]
    clock: StageClock | None

    def note_backward(
        self, worker: int, turn: int, made: list[tf.Operation], of_inputs: list[tf.Tensor]
    ) -> None: ...


class Microbatch:
    """Context in which layers are called for one micro-batch.

    Args:
        first: Its first row in the batch.
        end: One past its last row.
        fraction: Its part of the batch's rows.
        reads: For each pipeline, a context in which its copies of weights are read.

    Attributes:
        pipeline: Number of the pipeline that it goes through.
        turn: Its number among those of its pipeline.
        reads: A context in which the pipeline's copies of weights are read.
        sums: How many sums over micro-batches it has asked for.
    """

    def __init__(
        self, step: TurnStep, number: int, first: int, end: int, fraction: float, reads: list[Reads]
    ) -> None:
        self._step = step
        self.number, self.first, self.end, self.fraction = number, first, end, fraction
        self.turn, self.pipeline = divmod(number, len(reads))
        self.reads = reads[self.pipeline]
        self.sums = 0

    def __enter__(self) -> Microbatch:
        self.reads.__enter__()
        self._step.part = self
        return self

    def __exit__(self, *exc: Any) -> None:
        self._step.part = None
        self.reads.__exit__(*exc)


class StageAction:
    """Context of a stage's action on one micro-batch, after its previous action.

    Without that order, a stage with one thread would do a part of every micro-batch before it sends
    the first of them. Operations wait for those that were traced before, so there can be no cycle.

    Args:
        direction: `schedule.FORWARD` or `schedule.BACKWARD`.
    """

    def __init__(self, step: TurnStep, stage: int, part: Microbatch, direction: str) -> None:
        self._step, self._reads, self._action = step, part.reads, (direction, part.turn)
        self._worker = part.pipeline * len(step.stages.devices) + stage
        self._of_inputs: list[tf.Tensor] = []
        self._segment: Segment | None = None

    def begins_with(self, given: Any) -> None:
        """Notes with what it begins, before it is entered."""
        if self._step.clock is not None:
            self._segment = self._step.clock.begin(self._worker, self._action, given)

    def __enter__(self) -> StageAction:
        self._context = contextlib.ExitStack()
        if self._action[0] == schedule.BACKWARD:
            self._graph = tf.compat.v1.get_default_graph()
            self._first = len(self._graph.get_operations())
        # A layer that computes itself again for its gradients reads its weights again.
        self._context.enter_context(self._reads)
        self._context.enter_context(tf.control_dependencies(list(self._tensors_before())))
        return self

    def __exit__(self, *exc: Any) -> Any:
        if self._action[0] == schedule.BACKWARD:
            made = self._graph.get_operations()[self._first :]
            self._step.note_backward(self._worker, self._action[1], made, self._of_inputs)
        return self._context.__exit__(*exc)

    def _tensors_before(self) -> Iterator[tf.Tensor]:
        traced, done = self._step.traced[self._worker], self._step.done[self._worker]
        direction = self._action[0]
        last = next((one for one in reversed(traced) if one[0] == direction), None)
        if last == self._action:
            return  # A later layer of the same turn.
        traced.append(self._action)
        if direction == schedule.BACKWARD:
            return
        wanted = {last, *self._step.before[self._worker].get(self._action, ())} - {None}
        if self._segment is not None:
            self._segment.after |= wanted
        for action in sorted(wanted):
            yield from done.get(action, ())

    def ends_with(self, tensors: list[tf.Tensor], activations: list[tf.Tensor]) -> None:
        """Notes what is computed last, and what other stages may need."""
        self._step.activations += activations
        self._of_inputs = activations
        if self._segment is not None and self._step.clock is not None:
            self._step.clock.end(self._segment, self._worker, tensors, activations)
        if tensors:
            self._step.done[self._worker][self._action] = list(tensors)
