"""Sends steps to the workers and collects what they return.

Steps are closures of TensorFlow's `ClusterCoordinator`, which gives them to another worker if one
dies. A few are kept under way for every worker; their results are taken as they come, so that a
slow worker holds up nobody. `Clocks` says which worker is next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from keras_psplus.log import logger
from keras_psplus.parameter_server.scheduling.clocks import Clocks
from keras_psplus.parameter_server.scheduling.closures import Closure
from keras_psplus.parameter_server.scheduling.lanes import Lanes
from keras_psplus.parameter_server.scheduling.recovery import PausingRecovery

if TYPE_CHECKING:
    import tensorflow as tf

    from keras_psplus.parameter_server.data.tickets import Ticket
    from keras_psplus.parameter_server.data.worker_data import WorkerIterator

_STEPS_PER_WORKER = 2
# Training steps that a worker has under way: one that reads, one that computes, one that sends.
LANES = 3
_LOOK_FOR_ERRORS_SECONDS = 0.5
_LOOK_FOR_WORKERS_SECONDS = 5.0


class Scheduler:
    """The closures of one job.

    Args:
        coordinator: `tf.distribute.coordinator.ClusterCoordinator`.
        num_workers: Number of workers.
        check_workers: Called now and then while no closure returns; raises if it has to be given
            up.
        on_worker_back: Optional, called with the name of a worker that was lost and is back.
        overlap: Whether lost workers rejoin only between steps (required when steps overlap).
        lanes: How many closures a worker may run at a time, of those that allow it.
        are_workers_back: With `overlap`, asked after a loss; whether all workers respond.

    Attributes:
        on_worker_lost: None, or a function that is called with the number of a worker that is lost.
        recovery: `PausingRecovery`, or None without `overlap`.
        clocks: `Clocks` of the workers, for the steps that any of them may take.
    """

    on_worker_lost: Callable[[int], None] | None

    def __init__(
        self,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        num_workers: int,
        check_workers: Callable[[], None],
        on_worker_back: Callable[[str], None] | None = None,
        overlap: bool = False,
        lanes: int = 1,
        are_workers_back: Callable[[], bool] = lambda: True,
    ) -> None:
        self._on_worker_back, self.on_worker_lost = on_worker_back, None
        self._coordinator = coordinator
        self.recovery: PausingRecovery | None = None
        if overlap:
            self.recovery = PausingRecovery(coordinator._cluster.failure_handler, are_workers_back)
            for worker in self.workers if lanes > 1 else ():
                Lanes(worker, lanes, self.recovery)
        self.clocks = Clocks(num_workers)
        self.clocks.watch(self.workers)
        self._window = _STEPS_PER_WORKER
        self._check_workers = check_workers
        self._changed = threading.Condition()
        # By the result's id: the result and its closure.
        self._under_way: dict[int, tuple[Any, Closure]] = {}
        self._failed_workers: set[int] = set()
        self._back_since: dict[int, float] = {}
        self._last_result = time.monotonic()

    @property
    def _queue(self):
        return self._coordinator._cluster.closure_queue

    def take(self, iterator: WorkerIterator, count: int) -> Ticket | None:
        """Reserves batches of an iterator that workers read, and a worker for their steps.

        Args:
            iterator: `WorkerIterator`.
            count: Number of batches; the last ones of a share may be fewer.

        Returns:
            A `Ticket`, or None at the end of the data.
        """
        self._wait_until_free()
        ticket = iterator.take(
            count, lambda: self.clocks.free(self._window), self._check_for_errors
        )
        if ticket is not None:
            self.clocks.give(ticket.worker)
        return ticket

    def _wait_until_free(self):
        if not self._under_way:
            self.clocks.settle()
        self._wait_until(lambda: self.clocks.free(self._window))

    def submit(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        on_done: Callable[[Any, int], None],
        about: str,
        ticket: Ticket | None = None,
        may_overlap: bool = False,
    ) -> tf.distribute.coordinator.RemoteValue:
        """Schedules a function once a worker has room for it in its queue.

        Args:
            function: Concrete function.
            args: Its arguments.
            on_done: Called with the function's result and the number of the worker that has run it,
                from another thread.
            about: What it works on, for messages.
            ticket: What the last of the arguments is read by, if workers read the data.
            may_overlap: Whether a worker may begin with it before it is done with the one before.

        Returns:
            The result as a `RemoteValue`.
        """
        self._window = LANES + 1 if may_overlap else _STEPS_PER_WORKER
        if ticket is None:
            self._wait_until_free()
        closure = Closure(function, self._queue._cancellation_mgr, args)
        closure.ticket, closure.may_overlap = ticket, may_overlap
        if ticket is not None:
            closure.home = ticket.worker
        else:
            # Meanwhile nobody takes a slower worker's step, which would count, too.
            with self._queue._queue_lock:
                if free := self.clocks.free(self._window):
                    closure.home = free[0]
                    self.clocks.give(free[0])
        # With a lost worker's steps in the queue, others follow them there.
        is_in_turn = closure.home is None or not self._queue._queue.empty()
        return self.start(closure, on_done, about, None if is_in_turn else closure.home)

    @property
    def workers(self) -> Sequence[Any]:
        """TensorFlow's `Worker`s."""
        return self._coordinator._cluster.workers

    @property
    def cancellation_manager(self) -> Any:
        """Cancellation manager of the closures."""
        return self._queue._cancellation_mgr

    def start(
        self,
        closure: Closure,
        on_done: Callable[[Any, int], None],
        about: str,
        home: int | None = None,
    ) -> tf.distribute.coordinator.RemoteValue:
        """Schedules a closure at once.

        Args:
            closure: `Closure`.
            on_done: Called with what it returns and the number of the worker that has run it, from
                another thread.
            about: What it works on, for messages.
            home: The worker to run it, unless it is lost; None for whichever is free.

        Returns:
            The result as a `RemoteValue`.
        """
        closure.about, closure.scheduler = about, self
        result = closure.build_result(self._done, on_done)
        with self._changed:
            # The queue holds results weakly.
            if not self._under_way:
                self._last_result = time.monotonic()
            self._under_way[id(result)] = result, closure
        self._queue.put(closure, tag=None if home in self._failed_workers else home)
        return result

    def withdraw(self, closures: Sequence[Closure]) -> None:
        """Takes back the closures that no worker is at work on."""
        lost = set()
        with self._queue._queue_lock, self._changed:
            for waiting in (self._queue._queue, *self._queue._tagged_queue.values()):
                for closure in [c for c in waiting.queue if any(c is other for other in closures)]:
                    waiting.queue.remove(closure)
                    if closure.tried_on is not None:
                        lost.add(closure.tried_on)
                    self._under_way = {
                        key: pair for key, pair in self._under_way.items() if pair[1] is not closure
                    }
            self._changed.notify_all()
        for worker in sorted(lost - self._failed_workers):
            # No other worker will take the closure, and say so.
            logger.warning("worker-%d was lost; other workers take its steps", worker)
            self._note_loss(worker)

    def note_start(self, closure: Closure, worker: int) -> None:
        """Notes that a worker starts a closure, perhaps one that another worker has tried."""
        if closure.tag is not None:
            # TensorFlow counts untagged closures only.
            closure.tag = None
            with self._queue._queue_lock:
                self._queue.inflight_closure_count += 1
        lost = closure.tried_on
        if lost is not None:
            logger.warning(
                "worker-%d was lost with %s; worker-%d takes it once more, and %s",
                lost,
                closure.about,
                worker,
                closure.after_loss,
            )
            # Of several closures that it was lost with, this one may come to be taken late.
            if closure.started is None or closure.started > self._back_since.get(lost, 0.0):
                self._note_loss(lost)
        if worker in self._failed_workers:
            self._failed_workers.discard(worker)
            self._back_since[worker] = time.monotonic()
            logger.warning("worker-%d is back", worker)
            if self._on_worker_back is not None:
                self._on_worker_back(f"worker-{worker}")
        closure.tried_on, closure.started = worker, time.monotonic()
        if closure.home is not None and closure.home != worker:
            self.clocks.move(closure.home, worker)
            closure.home = worker

    def _note_loss(self, worker):
        self._failed_workers.add(worker)
        if self.on_worker_lost is not None:
            self.on_worker_lost(worker)
        self._give_to_others(worker)

    def _give_to_others(self, lost):
        with self._queue._queue_lock:
            waiting = self._queue._tagged_queue.pop(lost, None)
            while waiting is not None and not waiting.empty():
                closure = waiting.get(block=False)
                closure.tag = None
                self._queue._queue.put(closure, block=False)
            self._queue._closures_queued_condition.notify_all()

    def _done(self, result, on_done, worker):
        try:
            if result._error is None:
                on_done(result._fetched_tensors, worker)
        finally:
            with self._changed:
                _, closure = self._under_way.pop(id(result), (None, None))
                home = closure.home if closure is not None else None
                if home is not None:
                    self.clocks.finish(home)
                self._last_result = time.monotonic()
                self._changed.notify_all()
            # Not of a step that is cancelled, which happens under the queue's lock.
            if home is not None and result._error is None:
                self._take_from_slower(home)

    def _take_from_slower(self, idle):
        """Gives an idle worker a step that waits for a slower one."""
        with self._queue._queue_lock:
            slower = self.clocks.slower(idle)
            waiting = None if slower is None else self._queue._tagged_queue[slower]
            if not waiting or not waiting.queue or getattr(waiting.queue[-1], "home", None) is None:
                return
            # The last that it was given.
            closure = waiting.queue.pop()
            self.clocks.move(slower, idle)
            closure.home = closure.tag = idle
            self._queue._tagged_queue[idle].put(closure, block=False)
            self._queue._closures_queued_condition.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds that results bring about; raises a worker's error."""
        self._wait_until(condition)
        if not condition():
            self.join()

    @property
    def lost_workers(self) -> set[int]:
        """Numbers of the workers that were lost and have not taken a step since."""
        return set(self._failed_workers)

    @property
    def closures(self) -> list[Closure]:
        """The closures under way."""
        with self._changed:
            return [closure for _, closure in self._under_way.values()]

    @property
    def is_busy(self) -> bool:
        """Whether steps are under way."""
        return bool(self._under_way)

    def join(self) -> None:
        """Waits for all steps; raises a worker's error."""
        self._wait_until(lambda: not self._under_way)
        try:
            self._coordinator.join()
        except Exception:
            with self._queue._queue_lock, self._changed:
                # TensorFlow cancels untagged closures only.
                self._queue._tagged_queue.clear()
                self._under_way.clear()
            raise

    def _check_for_errors(self):
        """Raises a worker's error, or that of having no workers."""
        if self._queue._error is not None:
            self.join()
        self._check_workers()

    def _wait_until(self, condition):
        """Waits for a condition or a worker's error."""
        looked = time.monotonic()
        while True:
            with self._changed:
                if condition() or self._queue._error is not None:
                    return
                self._changed.wait(_LOOK_FOR_ERRORS_SECONDS)
            now = time.monotonic()
            if now - max(looked, self._last_result) > _LOOK_FOR_WORKERS_SECONDS:
                looked = now
                self._check_workers()
