"""Marks of a step's progress, for the message of a worker that waits.

A step's graph increments one counter when its batch has arrived, and another when the step is done.
A thread reads both counters during a step that takes long.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_psplus.all_reduce.liveness.step_clock import ARRIVED, DONE, StepClock
from keras_psplus.core.graph.variables import made_outside

TRACING, NO_DATA, RUNNING = "traces its step", "waits for its data", "has its batch"


class StepMarks:
    """Counts the batches of each local replica at two points of its steps.

    Attributes:
        clock: `StepClock` that adds up when these points are reached.
    """

    def __init__(self) -> None:
        self.clock = StepClock()
        self._counts: dict[str, tf.Variable] = {}
        self._tracing = 0

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Context in which a step is traced."""
        self._tracing += 1
        try:
            with self.clock.tracing():
                yield
        finally:
            self._tracing -= 1

    def received(self, device: str, batch: Any) -> None:
        """Counts a batch once it is there, in the step's graph."""
        self._count(device, 0, batch)

    def finished(self, device: str, results: Any) -> None:
        """Counts a batch once the step is done with it, in the step's graph."""
        self._count(device, 1, results)

    @property
    def state(self) -> str:
        """State of this worker's step: `TRACING`, `NO_DATA` or `RUNNING`."""
        counts = [variable.numpy() for variable in list(self._counts.values())]
        if self._tracing or not counts:
            return TRACING
        # A replica whose counts are equal has not got its batch.
        return NO_DATA if any(received == done for received, done in counts) else RUNNING

    def _count(self, device: str, at: int, structure: Any) -> None:
        tensors = [t for t in tf.nest.flatten(structure, expand_composites=True) if tf.is_tensor(t)]
        needed = tensors[:1] if at == 0 else tensors
        with tf.control_dependencies(needed):
            one = [1 - at, at]
            self._of(device).assign_add(tf.constant(one, tf.int64), read_value=False)
        self.clock.mark(DONE if at else ARRIVED, needed)

    def _of(self, device: str) -> tf.Variable:
        if device not in self._counts:
            self._counts[device] = made_outside(lambda: tf.zeros([2], tf.int64), device)
        return self._counts[device]
