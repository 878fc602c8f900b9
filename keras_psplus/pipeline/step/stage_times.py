"""Times of steps by task, added up on the chief.

chief    read ─┬─ call ──────────────────────────────────┬─ callbacks
stage          └─ work ─ link ─ wait for other stages ───┘
                  [ moments in the step's graph ]
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import tensorflow as tf

from keras_psplus.cluster.config import task_name
from keras_psplus.cluster.monitor import trace
from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.cluster.monitor.step_times import StepTimes
from keras_psplus.cluster.monitor.trace import Span
from keras_psplus.pipeline.base import schedule
from keras_psplus.pipeline.base.stages import Stages
from keras_psplus.pipeline.step.stage_clock import StageClock

_Item = TypeVar("_Item")
_CHIEF = task_name("chief", 0)


class StageTimes:
    """Seconds of training steps by task, for the chief's progress.

    Args:
        host: Name of the chief's device.
        measures: Whether stages are workers; devices of one process are not timed.
    """

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
        """Dict from tasks to the `StepTimes` of the steps that are done."""
        with self._lock:
            found = {_CHIEF: self._chief} if self._chief.steps else {}
            for worker, (steps, work, link) in self._of_workers.items():
                seconds = max(self._seconds, work + link)
                stage = worker % len(self._stages.devices)
                found[task_name("worker", worker)] = StepTimes(
                    steps,
                    seconds,
                    link=link,
                    wait=seconds - work - link,
                    part=f"stage {stage}",
                )
            return found

    def clock(self) -> StageClock | None:
        """A clock for a step that is being traced, whose present call does not count."""
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
                spans = Span(trace.STEP, began, now), Span(trace.READ, began, arrived)
                self._recorder.add(_CHIEF, [*spans, Span(trace.WAIT, arrived, now)])

    def note_moments(self, moments: tf.Tensor | None) -> None:
        """Adds what the clock of a step has returned."""
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
        """Adds what the stages of a pipeline have done in a step to the trace."""
        names = [task_name("worker", first + stage) for stage in range(len(stages))]
        if self._recorder is None or not self._recorder.wants(names[0]):
            return
        for name, own in zip(names, stages):
            self._recorder.add(name, [_traced(one) for one in own])


def _traced(one: schedule.Interval) -> Span:
    """A span of the trace, of which work has the name of its action."""
    direction, microbatch = one.action
    work = f"{direction} {microbatch}"
    name = {schedule.WORK: work, schedule.LINK: trace.RECEIVE, schedule.WAIT: trace.WAIT}[one.kind]
    return Span(name, one.began, one.ended)
