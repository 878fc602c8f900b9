"""Sends steps to the workers and collects what they return.

Steps are closures, which another worker runs if one dies. A few are kept under way for every
worker; their results are taken as they come, so that a slow worker holds up nobody. `Clocks` says
which worker is next.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from keras_psplus.log import logger
from keras_psplus.parameter_server.data import Ticket, WorkerIterator
from keras_psplus.parameter_server.membership import Members, Reconnection
from keras_psplus.parameter_server.queue import (
    Clocks,
    Closure,
    ClosureQueue,
    RemoteWorker,
    Run,
    WorkerCalls,
)
from keras_psplus.parameter_server.worker_function import is_worker_loss

_LOOK_FOR_ERRORS_SECONDS = 0.5
_LOOK_FOR_WORKERS_SECONDS = 5.0


class Lane:
    """A thread that runs one closure after another on a worker.

    A worker has several, so that one closure is read while another computes and a third is sent.
    """

    def __init__(self, worker: RemoteWorker, queue: ClosureQueue) -> None:
        self._worker, self._queue, self._calls = worker, queue, WorkerCalls(worker)
        threading.Thread(target=self._run, name=f"Lane-{worker.name}", daemon=True).start()

    def _run(self) -> None:
        while (closure := self._queue.take(self._worker.index)) is not None:
            self._process(closure)
            # Else it would be kept, with its result, until there is another one.
            del closure

    def _process(self, closure: Closure) -> None:
        queue, losses = self._queue, self._queue.losses[self._worker.index]
        self._calls.cancellation = queue.cancellation
        try:
            closure.execute_on(self._calls)
        except Exception as error:
            self._calls.clear_error()
            # Of calls that end because another one has failed, which says why.
            is_derived = isinstance(error, tf.errors.CancelledError) and "/job:" in str(error)
            if queue.error is not None or is_derived or queue.is_passing(error):
                queue.give_back(closure)
            elif is_worker_loss(error):
                self._worker.forget()
                queue.lose(closure, losses)
            else:
                queue.end(closure, error)
        else:
            queue.end(closure)


class Scheduler:
    """The closures of one job.

    `check_workers` is called now and then while no closure returns, and may raise; `window` is how
    many closures that allow it a worker has under way.
    """

    def __init__(
        self,
        num_workers: int,
        check_workers: Callable[[], None],
        members: Members,
        on_worker_back: Callable[[str], None] | None = None,
        window: int = 1,
        absent: Iterable[int] = (),
    ) -> None:
        self._on_worker_back = on_worker_back
        self._check_workers, self._window = check_workers, window
        self._members = members
        # Steps that keep a worker busy: those under way, and the one after them.
        self._enough = 2
        self._clocks = Clocks(num_workers)
        self.queue = queue = ClosureQueue(num_workers, self._clocks, absent)
        # Threads hold the queue, which ends them when nothing holds this.
        weakref.finalize(self, queue.close).atexit = False
        self._workers = [RemoteWorker(index) for index in range(num_workers)]
        for worker in self._workers:
            for _ in range(window):
                Lane(worker, queue)
        Reconnection(queue, members, weakly(self._note_return))

    def _note_return(self, worker: int) -> None:
        self._workers[worker].forget()
        if self.queue.losses[worker]:
            logger.warning("worker-%d is back", worker)
        else:
            logger.info("worker-%d has joined, and takes steps from now on", worker)
        if self._on_worker_back is not None:
            self._on_worker_back(f"worker-{worker}")

    def takers(self) -> list[int]:
        """Workers that a synchronous step is cut for; of a range, those there."""
        with self.queue.changed:
            lost = self.queue.lost if self._members.may_leave else ()
            there = [worker.index for worker in self._workers if worker.index not in lost]
        return there or [worker.index for worker in self._workers]

    def take(self, iterator: WorkerIterator, count: int) -> Ticket | None:
        """Reserves batches that workers read, and a worker for their steps; None at the end."""
        self._wait_until_free()
        ticket = iterator.take(count, self._free, self._check_for_errors)
        if ticket is not None:
            with self.queue.changed:
                self._clocks.give(ticket.worker)
        return ticket

    def begin(self, bound: float) -> None:
        """Begins an epoch, whose workers are at most so many steps ahead of the slowest."""
        with self.queue.changed:
            self._clocks.begin(bound)

    def _wait_until_free(self) -> None:
        with self.queue.changed:
            if self.queue.is_empty:
                self._clocks.settle()
        self._wait_until(self._free)

    def _free(self) -> list[int]:
        with self.queue.changed:
            return self._clocks.free(self._enough)

    def submit(
        self,
        function: tf.types.experimental.ConcreteFunction,
        args: tuple[Any, ...],
        on_done: Callable[[Any, Run], object],
        about: str,
        ticket: Ticket | None = None,
        may_overlap: bool = False,
        make: Callable[..., Closure] = Closure,
    ) -> Closure:
        """Schedules a function once a worker has room for it in its queue.

        The last argument is read by the `ticket`, if workers read the data. With `may_overlap`, a
        worker may begin with it before it is done with the one before.
        """
        self._enough = 1 + (self._window if may_overlap else 1)
        if ticket is None:
            self._wait_until_free()
        closure = make(function, args, about, on_done)
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

    def join(self) -> None:
        self._wait_until(lambda: self.queue.is_empty)
        self.queue.raise_error()

    def _check_for_errors(self) -> None:
        self.queue.raise_error()
        self._check_workers()

    def _wait_until(self, condition: Callable[[], Any]) -> None:
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


def weakly(method: Callable[[int], None]) -> Callable[[int], None]:
    """Function that calls a method for as long as something else holds its object."""
    reference = weakref.WeakMethod(method)

    def call(worker: int) -> None:
        if (held := reference()) is not None:
            held(worker)

    return call
