"""Closures that wait for workers, and those that workers have under way.

put ─► [ for whichever worker is free ]     first ─┬─► take ─► end
       [ for worker 0 ] [ for worker 1 ] ... then ─┘        └─► give_back, lose: waits again
"""

from __future__ import annotations

import collections
import contextlib
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_psplus.log import logger
from keras_psplus.parameter_server import worker_function
from keras_psplus.parameter_server.data import Ticket
from keras_psplus.parameter_server.worker_function import is_server_loss
from keras_psplus.tf_internals import (
    atomic_function,
    cancellation,
    context,
    coordinator_context,
    executor,
)

# Clocks of workers: steps given and done, and choice of the next worker.
#
#     steps of an epoch ─► [ fewest steps first ] ─┬─► worker 0: running, waiting, waiting (is full)
#                                                  └─► worker 1: running, waiting
#
# 1. Equally fast workers get equally many: the one with the fewest steps is next, and may have some
#    more in its queue than the others, so that noise in the times of steps decides nothing.
# 2. A slower worker's queue fills up; the others get the steps then, in proportion to their speed.
# 3. At the end of an epoch, an idle worker takes steps that wait in a slower one's queue.


# Steps by which equally fast workers may be apart for a while.
_NOISE = 4


class Clocks:
    def __init__(self, num_workers: int) -> None:
        self._num_workers, self._bound = num_workers, math.inf
        self._given = [0] * num_workers
        self._done = [0] * num_workers
        self._live = set(range(num_workers))
        # The next worker if all have as many, so that it is not always the same one.
        self._first = 0

    def begin(self, bound: float = math.inf) -> None:
        """Counts from zero again, while no step is under way, nobody further ahead than `bound`."""
        self._bound = bound
        self._given, self._done = [0] * self._num_workers, [0] * self._num_workers
        self._first += 1

    def settle(self) -> None:
        """Forgets unfinished steps, while none is under way: an error has ended them."""
        self._given = list(self._done)

    def lose(self, worker: int) -> None:
        self._live.discard(worker)

    def welcome(self, worker: int) -> None:
        """Notes that a worker is back, as far as the slowest one."""
        behind = self._slowest() - self._done[worker] if self._live else 0
        self._live.add(worker)
        if behind > 0:
            self._done[worker] += behind
            self._given[worker] += behind

    def _slowest(self) -> int:
        return min(self._done[worker] for worker in self._live)

    def _waiting(self, worker: int) -> int:
        return self._given[worker] - self._done[worker]

    def free(self, window: int) -> list[int]:
        """Workers that may be given a step, in order; `window` steps keep one busy."""
        able = [w for w in self._live if self._given[w] - self._slowest() <= self._bound]
        if all(self._waiting(worker) >= window for worker in able):
            return []
        return sorted(
            (worker for worker in able if self._waiting(worker) < window + _NOISE),
            key=lambda w: (
                *(self._given[w], self._waiting(w)),
                (w - self._first) % self._num_workers,
            ),
        )

    def give(self, worker: int) -> None:
        self._given[worker] += 1

    def slower(self, idle: int) -> int | None:
        """Worker whose waiting step an idle worker may take, or None."""
        given, done = self._given, self._done
        if self._waiting(idle) or idle not in self._live:
            return None
        if given[idle] - self._slowest() > self._bound:
            return None
        # Noise adds up as the square root of the number of steps.
        ahead = done[idle] - 2 - math.sqrt(done[idle]) / 2
        slower = [
            w
            for w in self._live
            if self._waiting(w) > 1 and (given[w] > given[idle] or done[w] < ahead)
        ]
        return max(slower, key=self._waiting, default=None)

    def move(self, giver: int, taker: int) -> None:
        self._given[giver] -= 1
        self._given[taker] += 1

    def finish(self, worker: int) -> None:
        self._done[worker] += 1


# A worker as the chief sees it: its resources, and calls of functions on it.


class RemoteWorker:
    def __init__(self, index: int) -> None:
        # The name is TensorFlow's, for `experimental_get_current_worker_index`.
        self.index = self.worker_index = index
        self.name = f"worker-{index}"
        self.device_name = f"/job:worker/replica:0/task:{index}"
        self._lock = threading.Lock()
        self.forget()

    def resource(self, owner: Any, make: Callable[[], Any]) -> Any:
        """A resource of this worker, made if missing, and deleted with its owner."""
        with self._lock:
            if owner not in self._resources:
                self._resources[owner] = make()
            return self._resources[owner]

    def forget(self) -> None:
        self._resources: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class WorkerCalls:
    def __init__(self, worker: RemoteWorker) -> None:
        self.worker = worker
        self.cancellation: Any = None
        self._executor = executor.new_executor(enable_async=False)

    def clear_error(self) -> None:
        """Forgets the error of a call, which TensorFlow would raise once more."""
        self._executor.clear_error()

    def call(self, concrete: tf.types.experimental.ConcreteFunction, *args: Any) -> Any:
        """Calls a function on the worker; returns its outputs, which stay there."""
        with (
            tf.device(self.worker.device_name),
            context.executor_scope(self._executor),
            coordinator_context.with_dispatch_context(self.worker),
        ):
            flat = iter(worker_function.call(concrete, *args, cancellation=self.cancellation))
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(flat),
            concrete.structured_outputs,
            expand_composites=True,
        )

    def run(self, function: Callable[[], object]) -> None:
        """Runs single operations on the worker."""
        with tf.device(self.worker.device_name), context.executor_scope(self._executor):
            function()


# Closures: functions that a worker runs, another one if it is lost, and their results.


class Run(NamedTuple):
    """A run of a closure, from its call to its result, by `time.time()`."""

    worker: int
    began: float
    ended: float


class Closure:
    """A concrete function, its arguments, and the result that a worker brings.

    `on_done` is called from another thread. The `ticket` is what workers' batches are read by;
    `home` the worker that it counts for, if `Clocks` chose one; `tried_on` the one that runs it, or
    ran it last; `started` is None while it waits; `lost_on` the one that was lost with it, until
    another begins.
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
        self.about = about
        # A function's `Turns`, if a worker may begin with another of its steps, and its place.
        self.turns: Any = None
        self.place = 0
        self.ticket: Ticket | None = None
        self.home: int | None = None
        self.tried_on: int | None = None
        self.lost_on: int | None = None
        self.started: float | None = None
        self._is_over = threading.Event()
        self._values: Any = None
        self._error: BaseException | None = None

    def execute_on(self, calls: WorkerCalls) -> None:
        worker, began = calls.worker, time.time()
        try:
            if self.ticket is not None:
                self._args = (*self._args[:-1], self.ticket.payload_on(worker.index))
            # The lines that made an operation, in the error of a call.
            with atomic_function.InterpolateRuntimeError(self._concrete.inference_fn):
                values = self.run_on(calls)
                # Now, as the worker may be lost later.
                values = tf.nest.map_structure(_fetched, values, expand_composites=True)
                self.commit()
        except tf.errors.OpError as raised:
            error = worker_function.as_loss(raised, worker.device_name)
            if not worker_function.is_of_step(error):
                raise error from None
            raise worker_function.translate_error(error, worker.name, self.about) from None
        self._on_done(values, Run(worker.index, began, time.time()))
        self._end(values, None)

    def run_on(self, calls: WorkerCalls) -> Any:
        """Runs the function; returns its outputs, which are still on the worker."""
        if self.turns is None:
            return calls.call(self._concrete, *self._args)
        if not self.place:
            calls.run(self.turns.reset)
        return self._call_with(self.place, calls)

    def _call_with(self, number: int, calls: WorkerCalls) -> Any:
        """Calls the function with a number behind its first argument's values."""
        initial, *others = self._args
        numbered = tf.constant(np.append(initial.numpy(), number))
        return calls.call(self._concrete, numbered, *others)

    def commit(self) -> None:
        """Has what it has left on servers count, once its result is with the chief."""

    def may_precede(self, other: Closure) -> bool:
        """Whether a worker may begin with another one before it is done with this."""
        return self.place > 0 and self.turns is not None and self.turns is other.turns

    def start(self, worker: int) -> int | None:
        """Notes that a worker begins; returns the one that was lost with it."""
        lost, self.lost_on = self.lost_on, None
        self.tried_on, self.started = worker, time.monotonic()
        return lost

    def fail(self, error: BaseException) -> None:
        self._end(None, error)

    def cancel(self) -> None:
        self.fail(tf.errors.CancelledError(None, None, f"{self.about} was cancelled"))

    def get(self) -> Any:
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
    return worker_function.to_chief(leaf) if isinstance(leaf, tf.Tensor) else leaf


# Steps that may fail because a parameter server did not answer, before it counts as lost.
_SERVER_FAILURES = 3


class ClosureQueue:
    """Closures of one job, by the worker that is to run them.

    `changed` is notified when a closure ends and when an error comes; `error` is the first since
    the last that was raised. `lost` are the workers that are not back, have not come yet, or leave.
    While it `is_pausing`, closures under way are waited for, and no other begins.
    """

    def __init__(self, num_workers: int, clocks: Clocks, absent: Iterable[int] = ()) -> None:
        self._clocks, self._lock = clocks, threading.RLock()
        self.changed = threading.Condition(self._lock)
        self._wake = [threading.Condition(self._lock) for _ in range(num_workers)]
        self._free: collections.deque[Closure] = collections.deque()
        self._waiting: list[collections.deque[Closure]] = [
            collections.deque() for _ in range(num_workers)
        ]
        self._running: list[list[Closure]] = [[] for _ in range(num_workers)]
        self._closures: dict[int, Closure] = {}
        # Those of a worker's last step, and the next one's place.
        self._turns: list[tuple[Any, int]] = [(None, 0)] * num_workers
        self.lost = set(absent)
        for worker in self.lost:
            clocks.lose(worker)
        self.losses = [0] * num_workers
        self.on_lost: Callable[[int], None] = lambda worker: None
        self.error: BaseException | None = None
        self.cancellation = cancellation.CancellationManager()
        self.last_end = time.monotonic()
        self._server_failures: collections.Counter[str] = collections.Counter()
        self.is_pausing = self.is_closed = False
        self._holds = 0

    @property
    def closures(self) -> list[Closure]:
        with self._lock:
            return list(self._closures.values())

    @property
    def is_empty(self) -> bool:
        return not self._closures

    def put(self, closure: Closure, home: int | None = None) -> None:
        """Adds a closure for a worker, or for any if it is lost or None."""
        with self._lock:
            if not self._closures:
                self.last_end = time.monotonic()
            self._closures[id(closure)] = closure
            if home is None or home in self.lost:
                self._put_for_any(closure)
            else:
                self._waiting[home].append(closure)
                self._wake[home].notify()

    def choose(self, closure: Closure, window: int) -> None:
        # Meanwhile nobody takes a slower worker's step, which would count, too.
        with self._lock:
            if free := self._clocks.free(window):
                closure.home = free[0]
                self._clocks.give(free[0])
            self.put(closure, closure.home)

    def take(self, worker: int) -> Closure | None:
        """Waits for a closure that a worker may begin with; None once closed."""
        with self._lock:
            self._wake[worker].wait_for(lambda: self.is_closed or self._has_next(worker))
            if self.is_closed:
                return None
            closure = (self._free or self._waiting[worker]).popleft()
            turns, place = self._turns[worker]
            closure.place = place if closure.turns is turns else 0
            self._turns[worker] = closure.turns, closure.place + 1
            self._running[worker].append(closure)
            lost = closure.start(worker)
            if closure.home is not None and closure.home != worker:
                self._clocks.move(closure.home, worker)
                closure.home = worker
        if lost is not None:
            logger.warning(
                "worker-%d was lost with %s; worker-%d takes it once more, and %s",
                *(lost, closure.about, worker, closure.after_loss),
            )
        return closure

    def _has_next(self, worker: int) -> bool:
        waiting = self._free or self._waiting[worker]
        if self.is_pausing or worker in self.lost or not waiting:
            return False
        running = self._running[worker]
        return not running or running[0].may_precede(waiting[0])

    def end(self, closure: Closure, error: BaseException | None = None) -> None:
        with self._lock:
            self._forget(closure)
            if closure.home is not None:
                self._clocks.finish(closure.home)
            if error is not None:
                self._end_turns(closure.tried_on)
                closure.fail(error)
                self.fail(error)
            elif closure.home is not None:
                self._take_from_slower(closure.home)

    def fail(self, error: BaseException) -> None:
        """Notes an error, which `raise_error` raises if it is the first."""
        with self._lock:
            self.error = self.error or error
            self.changed.notify_all()

    def give_back(self, closure: Closure) -> None:
        """Has any worker run a closure; after an error, ends it."""
        with self._lock:
            self._end_turns(closure.tried_on)
            if self.error is not None:
                self._forget(closure)
                closure.cancel()
                return
            self._stop_running(closure)
            self._put_for_any(closure)

    def lose(self, closure: Closure, losses: int) -> None:
        """Gives back a closure that its worker was lost with, and waiting ones.

        `losses` is how often the worker had been lost when the closure started.
        """
        with self._lock:
            worker = closure.lost_on = closure.tried_on
            assert worker is not None
            self.give_back(closure)
            if losses != self.losses[worker]:
                return
            self._do_without(worker)
        self.on_lost(worker)

    def _end_turns(self, worker: int | None) -> None:
        if worker is not None:
            self._turns[worker] = None, 0

    def turns_under_way(self, worker: int) -> Any:
        with self._lock:
            return next((closure.turns for closure in self._running[worker]), None)

    def retire(self, worker: int) -> None:
        """Gives a worker no more, and waits until it has done what it has."""
        with self._lock:
            if worker in self.lost:
                return
            self._do_without(worker)
            self.changed.wait_for(lambda: not self._running[worker])
        self.on_lost(worker)

    def _do_without(self, worker: int) -> None:
        self.lost.add(worker)
        self.losses[worker] += 1
        self._end_turns(worker)
        self._clocks.lose(worker)
        while self._waiting[worker]:
            self._put_for_any(self._waiting[worker].popleft())
        self.changed.notify_all()

    def is_passing(self, error: BaseException) -> bool:
        """Whether an error is of a server that may answer the next time."""
        if not is_server_loss(error):
            return False
        servers = set(re.findall(r"/job:ps/replica:0/task:(\d+)", str(error)))
        with self._lock:
            self._server_failures.update(servers)
            return all(self._server_failures[one] < _SERVER_FAILURES for one in servers)

    def withdraw(self, closures: Sequence[Closure]) -> None:
        lost: set[int] = set()
        with self._lock:
            for waiting in (self._free, *self._waiting):
                for closure in [c for c in waiting if any(c is other for other in closures)]:
                    waiting.remove(closure)
                    lost.update(() if closure.lost_on is None else [closure.lost_on])
                    self._forget(closure)
        for worker in sorted(lost):
            # No other worker will take the closure, and say so.
            logger.warning("worker-%d was lost; other workers take its steps", worker)

    def raise_error(self) -> None:
        """Cancels all closures if there is an error, and raises it once all have ended."""
        if self.error is None:
            return
        self.cancellation.start_cancel()
        with self._lock:
            for waiting in (self._free, *self._waiting):
                while waiting:
                    closure = waiting.popleft()
                    self._forget(closure)
                    closure.cancel()
            self.changed.wait_for(lambda: not any(self._running))
            self.cancellation = cancellation.CancellationManager()
            error, self.error = self.error, None
        raise error

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with self._lock:
            self.is_pausing = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._holds and not any(self._running))
        try:
            yield
        finally:
            with self._lock:
                self.is_pausing = False
                self._wake_all()

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Context, of several closures together, that `paused` waits for."""
        with self._lock:
            self.changed.wait_for(lambda: not self.is_pausing)
            self._holds += 1
        try:
            yield
        finally:
            with self._lock:
                self._holds -= 1
                self.changed.notify_all()

    def wait_for_loss(self) -> set[int]:
        """Waits until workers are lost, and returns their numbers; none once it is closed."""
        with self._lock:
            self.changed.wait_for(lambda: self.lost or self.is_closed)
            return set() if self.is_closed else set(self.lost)

    def welcome(self, worker: int) -> None:
        with self._lock:
            self.lost.discard(worker)
            self._clocks.welcome(worker)
            self._wake_all()

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            self._wake_all()

    def _put_for_any(self, closure: Closure) -> None:
        self._free.append(closure)
        for wake in self._wake:
            wake.notify()

    def _take_from_slower(self, idle: int) -> None:
        slower = self._clocks.slower(idle)
        if slower is None:
            return
        waiting = self._waiting[slower]
        if not waiting or waiting[-1].home is None:
            return
        # The last that it was given.
        closure = waiting.pop()
        self._clocks.move(slower, idle)
        closure.home = idle
        self._waiting[idle].append(closure)
        self._wake[idle].notify()

    def _forget(self, closure: Closure) -> None:
        self._closures.pop(id(closure), None)
        self._stop_running(closure)
        self.last_end = time.monotonic()

    def _stop_running(self, closure: Closure) -> None:
        worker = closure.tried_on
        if closure.started is not None and worker is not None:
            closure.started = None
            self._running[worker].remove(closure)
            self._wake[worker].notify_all()
        self.changed.notify_all()

    def _wake_all(self) -> None:
        for condition in (self.changed, *self._wake):
            condition.notify_all()
