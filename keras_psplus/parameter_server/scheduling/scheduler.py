"""Sends steps to the workers and collects what they return.

Steps are closures, which another worker runs if one dies. A few are kept under way for every
worker; their results are taken as they come, so that a slow worker holds up nobody. `Clocks` says
which worker is next.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from keras_psplus.log import logger
from keras_psplus.parameter_server.scheduling.clocks import Clocks
from keras_psplus.parameter_server.scheduling.closures import Closure, Run
from keras_psplus.parameter_server.scheduling.membership import Members
from keras_psplus.parameter_server.scheduling.queue import ClosureQueue
from keras_psplus.parameter_server.scheduling.remote_worker import RemoteWorker
from keras_psplus.parameter_server.scheduling.workers import Lane, Reconnection

if TYPE_CHECKING:
    import tensorflow as tf

    from keras_psplus.parameter_server.data.tickets import Ticket
    from keras_psplus.parameter_server.data.worker_data import WorkerIterator

_LOOK_FOR_ERRORS_SECONDS = 0.5
_LOOK_FOR_WORKERS_SECONDS = 5.0


class Scheduler:
    """The closures of one job.

    Args:
        num_workers: Number of workers.
        check_workers: Called now and then while no closure returns; raises if it has to be given
            up.
        on_worker_back: Optional, called with the name of a worker that has come, or is back.
        window: How many closures a worker may have under way, of those that allow it.
        members: `Members`, which finds the workers that come.
        absent: Numbers of the workers that are not there yet.

    Attributes:
        on_worker_lost: None, or a function that is called with the number of a worker that is lost.
        queue: `ClosureQueue`, for closures that are those of one worker or of all.
        clocks: `Clocks` of the workers, for the steps that any of them may take.
    """

    on_worker_lost: Callable[[int], None] | None

    def __init__(
        self,
        num_workers: int,
        check_workers: Callable[[], None],
        members: Members,
        on_worker_back: Callable[[str], None] | None = None,
        window: int = 1,
        absent: Iterable[int] = (),
    ) -> None:
        self._on_worker_back, self.on_worker_lost = on_worker_back, None
        self._check_workers, self._window = check_workers, window
        # Steps that keep a worker busy: those under way, and the one after them.
        self._enough = 2
        self.clocks = Clocks(num_workers)
        self.queue = queue = ClosureQueue(num_workers, self.clocks, absent)
        # Threads hold the queue, which ends them when nothing holds this.
        queue.on_lost = _weakly(self._note_loss)
        weakref.finalize(self, queue.close).atexit = False
        self._workers = [RemoteWorker(index) for index in range(num_workers)]
        for worker in self._workers:
            for _ in range(window):
                Lane(worker, queue)
        Reconnection(queue, members, _weakly(self._note_return))

    def _note_loss(self, worker: int) -> None:
        if self.on_worker_lost is not None:
            self.on_worker_lost(worker)

    def _note_return(self, worker: int) -> None:
        self._workers[worker].forget()
        if self.queue.losses[worker]:
            logger.warning("worker-%d is back", worker)
        else:
            logger.info("worker-%d has joined, and takes steps from now on", worker)
        if self._on_worker_back is not None:
            self._on_worker_back(f"worker-{worker}")

    def take(self, iterator: WorkerIterator, count: int) -> Ticket | None:
        """Reserves batches of an iterator that workers read, and a worker for their steps.

        Args:
            iterator: `WorkerIterator`.
            count: Number of batches; the last ones of a share may be fewer.

        Returns:
            A `Ticket`, or None at the end of the data.
        """
        self._wait_until_free()
        ticket = iterator.take(count, self._free, self._check_for_errors)
        if ticket is not None:
            self.clocks.give(ticket.worker)
        return ticket

    def _wait_until_free(self) -> None:
        if not self.is_busy:
            self.clocks.settle()
        self._wait_until(self._free)

    def _free(self) -> list[int]:
        return self.clocks.free(self._enough)

    def submit(
        self,
        function: tf.types.experimental.ConcreteFunction,
        args: tuple[Any, ...],
        on_done: Callable[[Any, Run], object],
        about: str,
        ticket: Ticket | None = None,
        may_overlap: bool = False,
    ) -> Closure:
        """Schedules a function once a worker has room for it in its queue.

        Args:
            function: Concrete function.
            args: Its arguments.
            on_done: Called with the function's result and its `Run`, from another thread.
            about: What it works on, for messages.
            ticket: What the last of the arguments is read by, if workers read the data.
            may_overlap: Whether a worker may begin with it before it is done with the one before.

        Returns:
            The `Closure`, whose `get` returns the result.
        """
        self._enough = 1 + (self._window if may_overlap else 1)
        if ticket is None:
            self._wait_until_free()
        closure = Closure(function, args, about, on_done)
        closure.ticket, closure.may_overlap = ticket, may_overlap
        self.queue.raise_error()
        if ticket is None:
            self.queue.choose(closure, self._enough)
        else:
            closure.home = ticket.worker
            self.queue.put(closure, closure.home)
        return closure

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds that results bring about; raises a worker's error."""
        self._wait_until(condition)
        if not condition():
            self.join()

    @property
    def is_busy(self) -> bool:
        """Whether steps are under way."""
        return not self.queue.is_empty

    def join(self) -> None:
        """Waits for all steps; raises a worker's error."""
        self._wait_until(lambda: self.queue.is_empty)
        self.queue.raise_error()

    def _check_for_errors(self) -> None:
        """Raises a worker's error, or that of having no workers."""
        self.queue.raise_error()
        self._check_workers()

    def _wait_until(self, condition: Callable[[], Any]) -> None:
        """Waits for a condition or a worker's error."""
        looked = time.monotonic()
        while True:
            with self.queue.changed:
                if condition() or self.queue.error is not None:
                    return
                self.queue.changed.wait(_LOOK_FOR_ERRORS_SECONDS)
            now = time.monotonic()
            if now - max(looked, self.queue.last_end) > _LOOK_FOR_WORKERS_SECONDS:
                looked = now
                self._check_workers()


def _weakly(method: Callable[[int], None]) -> Callable[[int], None]:
    """Function that calls a method for as long as something else holds its object."""
    reference = weakref.WeakMethod(method)

    def call(worker: int) -> None:
        if (held := reference()) is not None:
            held(worker)

    return call
