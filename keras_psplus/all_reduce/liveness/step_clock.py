"""Times of a worker's steps: for its batches, in collectives, and between two steps.

A step's graph adds up when its batches have arrived and when it was done with them; the host adds
up when it has called the step, and when that returned. Nobody reads a clock's variable during a
step. Calls in which something is traced are left out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.cluster.config import TaskConfig, task_name
from keras_psplus.cluster.monitor import trace
from keras_psplus.cluster.monitor.progress import Progress
from keras_psplus.cluster.monitor.step_times import PeerConnections, StepTimes
from keras_psplus.cluster.monitor.trace import Span, TraceRecorder
from keras_psplus.core.graph.variables import made_outside
from keras_psplus.tf_internals import framework_ops as ops

# Small numbers, so that sums of many keep microseconds.
_ORIGIN = time.time()
ARRIVED, DONE = range(2)
# So old are times at most that are asked for during a step.
_LAST_SECONDS = 0.5


class StepClock:
    """Clock of the training and evaluation steps of this process.

    Attributes:
        measures: Whether steps are timed in their graph: those of one replica. Several replicas of
            one graph would wait for each other's clocks.
    """

    def __init__(self) -> None:
        self.measures = False
        self._name = ""
        self._recorder: TraceRecorder | None = None
        self._connections: PeerConnections | None = None
        self._meets: Callable[[], float] = lambda: 0.0
        self._sums: tf.Variable | None = None
        self._traced_from: np.ndarray | None = None
        self._left_out = np.zeros(3)
        self._steps = self._called = self._returned = self._host = self._data = 0.0
        self._ended: float | None = None
        self._is_single, self._is_called, self._entered = True, False, 0
        self._last, self._last_at = StepTimes(), 0.0

    def start(self, task: TaskConfig, progress: Progress, meets: Callable[[], float]) -> None:
        """Starts to measure.

        Args:
            progress: Progress of this process, whose `times` are this clock's.
            meets: Function without arguments that returns the seconds in collectives up to now.
        """
        self.measures, self._meets = True, meets
        self._name, self._recorder = task.name, trace.current()
        self._connections = PeerConnections(
            {task_name(j, i): address for j, i, address in task.peers(("chief", "worker"))}
        )
        progress.times = lambda: {task.name: self.times()} if self._sums is not None else {}
        progress.begin_epoch, progress.timing = self._begin_epoch, self.call

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Context in which a step is traced, before it runs for the first time."""
        if self._traced_from is None and self._is_called:
            with ops.init_scope():
                self._traced_from = self._read()
        yield

    def _begin_epoch(self) -> None:
        """Starts an epoch: time before its first step is not between two steps."""
        self._ended = None

    @contextlib.contextmanager
    def call(self, steps: int) -> Iterator[None]:
        """Context of a call of a compiled function."""
        recorder = self._recorder
        if recorder is not None and not recorder.wants(self._name):
            recorder = self._recorder = None
        if self._is_single != (steps == 1):
            self._go_on_from(self._data_seconds(self._read()))
            self._is_single = steps == 1
        before = None if recorder is None else self._read()
        called = time.time()
        self._entered += 1
        self._is_called = True
        try:
            yield
        except (StopIteration, tf.errors.OutOfRangeError):
            raise
        except BaseException:
            # Of a step that has failed, the graph may have added up one moment of two.
            self._go_on_from(self._data)
            raise
        finally:
            self._is_called = False
        returned = time.time()
        if recorder is not None and before is not None:
            arrived, done = (float(one) for one in (self._read() - before + _ORIGIN)[:2])
            met = recorder.collective
            ready = [] if met is None else [float(moment) for moment in met.numpy()]
            spans = _spans(called, returned, arrived, done, ready if steps == 1 else None)
            recorder.add(self._name, spans)
        ended, self._ended = self._ended, returned
        if self._traced_from is not None:
            before, self._traced_from = self._traced_from, None
            self._left_out += self._read() - before
            return
        self._steps += steps
        self._called += called - _ORIGIN
        self._returned += returned - _ORIGIN
        if ended is not None:
            self._host += called - ended
        if returned - self._last_at > _LAST_SECONDS:
            self._last, self._last_at = self._now(), returned

    def mark(self, moment: int, tensors: list[Any]) -> None:
        """Adds up the moment at which tensors are there, in the step's graph.

        Args:
            moment: `ARRIVED` or `DONE`.
        """
        # Others than `fit` and `evaluate` also take steps, and do not say when they call them.
        if not self.measures or not self._is_called:
            return
        with ops.device("CPU:0"):
            if self._sums is None:
                self._sums = made_outside(lambda: tf.zeros([2], tf.float64))
            with tf.control_dependencies(tensors):
                now = tf.timestamp() - _ORIGIN
            zero = tf.zeros([], tf.float64)
            both = [now, zero] if moment == ARRIVED else [zero, now]
            self._sums.assign_add(tf.stack(both), read_value=False)

    def times(self) -> StepTimes:
        """Times of all steps up to now.

        On another thread than the one that trains, up to a moment ago if a step is under way.
        """
        entered = self._entered
        if self._is_called:
            return self._last
        now = self._now()
        return self._last if entered != self._entered else now

    def _now(self) -> StepTimes:
        read = self._read()
        seconds, self._data = self._returned - self._called, self._data_seconds(read)
        peers = {} if self._connections is None else self._connections.totals()
        return StepTimes(
            steps=self._steps,
            seconds=seconds,
            data=self._data,
            host=self._host,
            meets=min(max(0.0, float((read - self._left_out)[2])), seconds - self._data),
            peers=peers,
        )

    def _data_seconds(self, read: np.ndarray) -> float:
        """Seconds of waiting for batches up to what was read."""
        arrived, done, _ = read - self._left_out
        # Of several steps in a call, each begins when the one before is done.
        begun = self._called if self._is_single else self._called + done - self._returned
        return float(min(max(0.0, arrived - begun), self._returned - self._called))

    def _go_on_from(self, data: float) -> None:
        """Leaves out what the graph has added up, but for some seconds for data."""
        moments = self._called + data, self._returned
        self._left_out[:2] = self._read()[:2] - moments
        self._traced_from = None

    def _read(self) -> np.ndarray:
        moments = np.zeros(2) if self._sums is None else self._sums.numpy()
        return np.append(moments, self._meets())


def _spans(
    called: float, returned: float, arrived: float, done: float, met: list[float] | None
) -> list[Span]:
    """Spans of a call, and of its parts unless it takes several steps."""
    spans = [Span(trace.STEP, called, returned)]
    if met is None or not called <= arrived <= done <= returned:
        return spans
    spans.append(Span(trace.READ, called, arrived))
    if not met or not arrived <= met[0] <= met[1] <= done:
        return [*spans, Span(trace.COMPUTE, arrived, done)]
    return [
        *spans,
        Span(trace.COMPUTE, arrived, met[0]),
        Span(trace.COLLECTIVE, met[0], met[1]),
        Span(trace.UPDATE, met[1], done),
    ]
