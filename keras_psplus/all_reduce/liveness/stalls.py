"""Detection of the workers that have not reached a step.

A worker that has waited at a step for a moment posts that in the key-value store of TensorFlow's
coordination service. While steps go on, nothing is sent.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.all_reduce.liveness.step_clock import ARRIVED, DONE, StepClock
from keras_psplus.cluster.config import TaskConfig, task_name
from keras_psplus.cluster.monitor import stalls
from keras_psplus.cluster.monitor.stalls import PendingWait
from keras_psplus.cluster.preflight import is_large
from keras_psplus.core.graph.variables import made_outside
from keras_psplus.tf_internals import context

if TYPE_CHECKING:
    from keras_psplus.cluster.monitor.progress import Progress


# Marks of a step's progress, for the message of a worker that waits.
#
# A step's graph increments one counter when its batch has arrived, and another when the step is
# done. A thread reads both counters during a step that takes long.


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


_ASK_SECONDS = 0.5


class StallProbe(stalls.StallProbe):
    def __init__(self, task: TaskConfig, progress: Progress, marks: StepMarks) -> None:
        super().__init__(task.name, progress)
        self._task, self._marks = task, marks
        self._others = {
            task_name(job, index): address
            for job, index, address in task.peers(("chief", "worker"))
        }
        self._asks_first_only = is_large(1 + len(self._others)) and not task.is_chief
        self._last: int | None = None
        self._posted: tuple[int, str] | None = None
        self._calling: threading.Thread | None = None

    def look(self) -> dict[int, PendingWait]:
        waits, entered = super().look(), self._progress.entered
        if self._posted is not None and self._posted[0] != entered:
            self._withdraw()
        if waits:
            if entered == self._last:
                self._post(entered)
            self._last = entered
        return waits

    def describe(self, entered: int) -> str:
        return f"a collective; not arrived: {self.missing(entered)}"

    def missing(self, entered: int) -> str:
        """Names the workers that have not reached a step, or the state of all.

        In a large cluster the first worker asks all others, and these ask the first one only.

        Args:
            entered: The step's number, `Progress.entered`.
        """
        if self._asks_first_only:
            return self._missing_by_first(entered)
        silent = stalls.unresponsive_tasks(self._others)
        # The first of all workers has the store.
        can_ask = next(iter(self._others), None) not in silent or self._task.is_chief
        states: dict[str, str | None] = {self._task.name: self._marks.state}
        if can_ask:
            states |= {n: self._state_of(n, entered) for n in self._others if n not in silent}
        missing = [f"{name} (no answer)" for name in silent]
        missing += [name for name, state in states.items() if state is None]
        return ", ".join(missing) or _all_arrived(states)

    def _missing_by_first(self, entered: int) -> str:
        first, address = next(iter(self._others.items()))
        if stalls.unresponsive_tasks({first: address}):
            return f"{first} (no answer)"
        if self._state_of(first, entered) is None:
            return first
        return f"one that {first} waits for, and names in its log"

    def _state_of(self, name: str, entered: int) -> str | None:
        """State of another worker in a step, or None if it has not reached it."""
        try:
            return context.context().get_config_key_value(
                _key(name, entered), int(_ASK_SECONDS * 1000)
            )
        except tf.errors.OpError:
            return None

    def _post(self, entered: int) -> None:
        """Lets the others know where in a step this worker is."""
        posted = entered, self._marks.state
        if posted != self._posted:
            self._withdraw()
            self._call_in_thread(context.Context.set_config_key_value, *posted)
            self._posted = posted

    def _withdraw(self) -> None:
        if self._posted is not None:
            self._call_in_thread(context.Context.delete_config_key_value, self._posted[0])
        self._posted = None

    def _call_in_thread(self, method: Callable[..., Any], entered: int, *text: str) -> None:
        """Calls the store from a separate thread: one that hangs would never answer."""

        def call() -> None:
            try:
                method(context.context(), _key(self._task.name, entered), *text)
            except (tf.errors.OpError, ValueError):
                pass  # The job is about to end.

        before, self._calling = self._calling, threading.Thread(target=call, daemon=True)
        if before is not None:
            # A note that changes is deleted, and then written.
            before.join(_ASK_SECONDS)
        self._calling.start()


def _all_arrived(states: Mapping[str, str | None]) -> str:
    """Describes the wait of workers that have all reached a step."""
    if set(states.values()) == {RUNNING}:
        return (
            "none; all workers have their batches and have not finished the step: a computation "
            "takes long, or a connection between them is stuck"
        )
    return "none; " + ", ".join(f"{name} {state}" for name, state in states.items())


def _key(name: str, entered: int) -> str:
    return f"keras_psplus/stalls/{entered}/{name}"
