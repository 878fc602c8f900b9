"""The objects that a strategy's steps are made with, and their times by task.

chief    read ─┬─ call ──────────────────────────────────┬─ callbacks
stage          └─ work ─ link ─ wait for other stages ───┘
                  [ moments in the step's graph ]
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypeVar

import tensorflow as tf

from keras_psplus.cluster.config import task_name
from keras_psplus.cluster.monitor import trace
from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.cluster.monitor.step_times import StepTimes
from keras_psplus.core.batch.replica_step import time_after
from keras_psplus.keras_internals.keras_parts import tree
from keras_psplus.pipeline import schedule
from keras_psplus.pipeline.replicas import Copies
from keras_psplus.pipeline.schedule import Action, Span
from keras_psplus.pipeline.splitter import Splitter, Variables
from keras_psplus.pipeline.stages import Stages, host_of
from keras_psplus.pipeline.traffic import PipelineTraffic
from keras_psplus.tf_internals import context as tf_context
from keras_psplus.tf_internals import framework_ops as ops


@dataclasses.dataclass(eq=False)
class Segment:
    """Calls of an action's layers, each with the results of those before.

    The first begins with the tensors `given`, after the actions `after`; other stages may need
    `sent`; `ends` are computed last.
    """

    action: Action
    given: list[tf.Tensor]
    after: set[Action] = dataclasses.field(default_factory=set)
    sent: list[tf.Tensor] = dataclasses.field(default_factory=list)
    ends: list[tf.Tensor] = dataclasses.field(default_factory=list)


class StageClock:
    """Clock of one traced step, whose `number` tells it from those of other traces.

    Each call of the step returns the moments of all workers, in one tensor of the chief.
    """

    def __init__(self, number: int, devices: list[str], host: str) -> None:
        self._number, self._devices, self._host = number, devices, host
        self._graph: tf.Graph | None = tf.compat.v1.get_default_graph()
        self._segments: list[list[Segment]] = [[] for _ in devices]
        # By the names of what they have made.
        self._made: list[dict[str, Segment]] = [{} for _ in devices]

    def begin(self, worker: int, action: Action, given: Any) -> Segment | None:
        """Notes tensors that an action's layers begin with; None in a branch or a loop."""
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

        What is not `run`, such as gradients by the batch, is not waited for.
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


_Item = TypeVar("_Item")
_CHIEF = task_name("chief", 0)


class StageTimes:
    """Seconds of training steps by task, for the chief's progress; of workers only."""

    def __init__(self, progress: Progress, stages: Stages, host: str, measures: bool) -> None:
        self._stages, self._host, self._measures = stages, host, measures
        self._lock = threading.Lock()
        self._clocks: list[StageClock] = []
        self._chief, self._recorder = StepTimes(), trace.current()
        # By worker: steps, seconds of work, and of waiting for links.
        self._of_workers: dict[int, tuple[int, float, float]] = {}
        self._seconds = 0.0
        self._is_tracing, self._returned = False, 0.0
        if measures:
            progress.times, progress.begin_epoch = self.times, self._begin_epoch

    def _begin_epoch(self) -> None:
        """Starts an epoch: time before its first step is not between two steps."""
        self._returned = 0.0

    def times(self) -> dict[str, StepTimes]:
        with self._lock:
            found = {_CHIEF: self._chief} if self._chief.steps else {}
            for worker, (steps, work, link) in self._of_workers.items():
                seconds = max(self._seconds, work + link)
                stage = worker % len(self._stages.devices)
                found[task_name("worker", worker)] = StepTimes(
                    steps, seconds, link=link, wait=seconds - work - link, part=f"stage {stage}"
                )
            return found

    def clock(self) -> StageClock | None:
        if not self._measures:
            return None
        self._is_tracing = True
        self._clocks.append(StageClock(len(self._clocks), self._stages.all_devices, self._host))
        return self._clocks[-1]

    def timed(self, batches: Iterable[_Item]) -> Iterator[_Item]:
        """Yields batches, and times waiting for each and the step that is taken with it."""
        began = time.time()
        for batch in batches:
            arrived = time.time()
            yield batch
            self._note_step(began, arrived)
            began = time.time()

    def _note_step(self, began: float, arrived: float) -> None:
        now, is_traced = time.time(), self._is_tracing
        host = began - self._returned if self._returned else 0.0
        self._is_tracing, self._returned = False, now
        if not is_traced and self._measures:
            with self._lock:
                wait, data = now - arrived, arrived - began
                self._chief = self._chief.plus(StepTimes(1, data=data, wait=wait, host=host))
                self._seconds += wait
            if self._recorder is not None and self._recorder.wants(_CHIEF):
                spans = trace.Span(trace.STEP, began, now), trace.Span(trace.READ, began, arrived)
                self._recorder.add(_CHIEF, [*spans, trace.Span(trace.WAIT, arrived, now)])

    def note_moments(self, moments: tf.Tensor | None) -> None:
        if moments is None or self._is_tracing:
            return
        number, *_ = read = moments.numpy().tolist()
        spans, count = self._clocks[int(number)].spans(read), len(self._stages.devices)
        with self._lock:
            for first in range(0, len(spans), count):
                stages = schedule.intervals(spans[first : first + count])
                self._record(first, stages)
                for worker, (work, link) in enumerate(schedule.work_and_links(stages), first):
                    steps, *before = self._of_workers.get(worker, (0, 0.0, 0.0))
                    self._of_workers[worker] = steps + 1, before[0] + work, before[1] + link

    def _record(self, first: int, stages: list[list[schedule.Interval]]) -> None:
        names = [task_name("worker", first + stage) for stage in range(len(stages))]
        if self._recorder is None or not self._recorder.wants(names[0]):
            return
        for name, own in zip(names, stages):
            self._recorder.add(name, [_traced(one) for one in own])


def _traced(one: schedule.Interval) -> trace.Span:
    """A span of the trace, of which work has the name of its action."""
    direction, microbatch = one.action
    work = f"{direction} {microbatch}"
    name = {schedule.WORK: work, schedule.LINK: trace.RECEIVE, schedule.WAIT: trace.WAIT}[one.kind]
    return trace.Span(name, one.began, one.ended)


@dataclasses.dataclass(eq=False)
class PipelineContext:
    """The objects of a `PipelineStrategy` that its steps are made with."""

    stages: Stages
    splitter: Splitter
    variables: Variables
    copies: Copies
    traffic: PipelineTraffic
    times: StageTimes
    # The `PipeDreamFunction` whose steps have begun and not ended.
    under_way: Any = None
    # Whether variables were given values since the last step began.
    has_written: bool = False

    def finish_writes(self) -> None:
        """Waits, before a step, until workers have done what was written to variables.

        A chief sends eager operations and goes on, and nothing orders them before the parts of a
        function that runs on the same worker.
        """
        if self.has_written:
            self.has_written = False
            tf_context.context().sync_executors()
