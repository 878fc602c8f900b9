"""Closures: functions that a worker runs, another one if it is lost, and their results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from keras_psplus.parameter_server.data.tickets import Ticket
from keras_psplus.parameter_server.scheduling.workers import WorkerCalls
from keras_psplus.parameter_server.tracing import losses, remote, step_errors


class Run(NamedTuple):
    """A run of a closure, as the chief sees it.

    Attributes:
        began, ended: Seconds of `time.time()` when it was called, and when its result was here.
    """

    worker: int
    began: float
    ended: float


class Closure:
    """A concrete function, its arguments, and the result that a worker brings.

    Args:
        about: Description of its work, for messages.
        on_done: Called with the result and its `Run`, from another thread.

    Attributes:
        ticket: What the last of the arguments is read by, if workers read the data.
        may_overlap: Whether a worker may run it beside others of which that is true.
        home: Number of the worker that it counts for, or None if `Clocks` did not choose one.
        tried_on: Number of the worker that runs it, or ran it last.
        started: Time at which that worker began with it; None while it waits.
        lost_on: Number of the worker that was lost with it, until another one begins with it.
    """

    after_loss = "its update may be applied twice"

    def __init__(
        self,
        concrete: tf.types.experimental.ConcreteFunction,
        args: tuple[Any, ...],
        about: str,
        on_done: Callable[[Any, Run], object],
    ) -> None:
        self._concrete, self._args, self._on_done = concrete, args, on_done
        self.about, self.may_overlap = about, False
        self.ticket: Ticket | None = None
        self.home: int | None = None
        self.tried_on: int | None = None
        self.lost_on: int | None = None
        self.started: float | None = None
        self._is_over = threading.Event()
        self._values: Any = None
        self._error: BaseException | None = None

    def execute_on(self, calls: WorkerCalls) -> None:
        """Runs it on a worker, and brings the result to the chief."""
        worker, began = calls.worker, time.time()
        try:
            if self.ticket is not None:
                self._args = (*self._args[:-1], self.ticket.payload_on(worker.index))
            with remote.with_stacks(self._concrete):
                values = self.run_on(calls)
                # Now, as the worker may be lost later.
                values = tf.nest.map_structure(_fetched, values, expand_composites=True)
                self.commit()
        except tf.errors.OpError as raised:
            error = losses.as_loss(raised, worker.device_name)
            if not step_errors.is_of_step(error):
                raise error from None
            raise step_errors.translate_error(error, worker.name, self.about) from None
        self._on_done(values, Run(worker.index, began, time.time()))
        self._end(values, None)

    def run_on(self, calls: WorkerCalls) -> Any:
        """Runs the function; returns its outputs, which are still on the worker."""
        return calls.call(self._concrete, *self._args)

    def commit(self) -> None:
        """Has what it has left on servers count, once its result is with the chief."""

    def start(self, worker: int) -> int | None:
        """Notes that a worker begins; returns the one that was lost with it."""
        lost, self.lost_on = self.lost_on, None
        self.tried_on, self.started = worker, time.monotonic()
        return lost

    def fail(self, error: BaseException) -> None:
        """Ends it with an error, which `get` raises."""
        self._end(None, error)

    def cancel(self) -> None:
        """Ends it after the error of another one."""
        self.fail(tf.errors.CancelledError(None, None, f"{self.about} was cancelled"))

    def get(self) -> Any:
        """Waits for its end; returns the result, or raises the error."""
        self._is_over.wait()
        if self._error is not None:
            raise self._error
        return self._values

    def _end(self, values: Any, error: BaseException | None) -> None:
        self._values, self._error = values, error
        # Results may be kept for long, batches and what waits for them need not.
        self._args, self.ticket = (), None
        self._on_done = lambda result, run: None
        self._is_over.set()


def _fetched(leaf: Any) -> Any:
    return remote.to_chief(leaf) if isinstance(leaf, tf.Tensor) else leaf
