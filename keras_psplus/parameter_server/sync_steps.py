"""Synchronous training: all workers take each step together, from the same weights.

The chief cuts a global batch into shares, one for each worker. The parameter servers add up the
gradients; once those of a step are there, the chief lets the optimizer apply their mean, and the
next step begins. Nothing is applied before, so a worker that is lost costs the attempt at a step,
never half an update.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.base import threads
from keras_psplus.core.base.optimizers import scalar_tensor
from keras_psplus.core.batch import batches as core_batches
from keras_psplus.log import logger, warn_once
from keras_psplus.parameter_server.context import Attempt, StepContext
from keras_psplus.parameter_server.data import Ticket
from keras_psplus.parameter_server.queue import Closure, Run, WorkerCalls
from keras_psplus.parameter_server.runner import StepRunner, describe
from keras_psplus.parameter_server.step_functions import changes_and_logs
from keras_psplus.parameter_server.sync_functions import SyncFunction, SyncFunctions
from keras_psplus.parameter_server.traffic import TrafficTotals
from keras_psplus.parameter_server.worker_function import (
    call,
    is_of_worker,
    on_worker,
    to_chief,
    writes,
)

# Updates of steps, with a window of one step, or of two that overlap.
#
#     window 1   | gradients of all workers | update |
#     window 2   | gradients of all workers |
#                |        update, and workers' reads of it |    `Overlap` has its steps
#
# The update is the same. With a window of two it starts before the gradients if workers have copies
# of what the last one made, keeps what it overwrites, and ends with new copies.


_LOOK_FOR_LOSSES_SECONDS = 0.5
# Of workers whose step is given up; what they read is read again.
_GIVE_UP_SECONDS = 5.0


class StepUpdate:
    """The update of one attempt at a step, whose `readers` bring new values to copies.

    It `is_early` if it started before all gradients were there: workers compute on copies.
    """

    def __init__(
        self, function: SyncFunction, stamp: int, readers: Sequence[int], totals: TrafficTotals
    ) -> None:
        self.function, self.readers, self.is_early = function, readers, False
        self._overlap: Any = function.overlap
        self._stamp, self._totals, self._can_undo = stamp, totals, False
        self._update: concurrent.futures.Future[None] | None = None
        self._fetches: dict[int, concurrent.futures.Future[None]] = {}

    def start(self, count: int, scale: float) -> None:
        """Starts it, for so many gradients, whose sum is multiplied by a factor."""
        self._count = count
        if self._overlap is None:
            # Nothing else happens meanwhile.
            self._run(scale)
            return
        self._update = threads.start(lambda: self._run(scale), "Update")
        self._fetches = {
            worker: threads.start(functools.partial(self._fetch, worker), "Fetch")
            for worker in self.readers
        }

    def _run(self, scale: float) -> None:
        if self._overlap is not None:
            self._overlap.undo.keep()
            self._can_undo = True
        self.function.apply(self._stamp, self._count, scale, len(self.readers))

    def _fetch(self, worker: int) -> None:
        fetch = self._overlap.fetch
        with on_worker(worker, device=None):
            (counts,) = call(fetch.concrete)
        self._totals.add(fetch.costs, np.asarray(counts))

    def finish(self, lost_workers: Callable[[], Collection[int]]) -> set[int]:
        """Waits for its end, but for lost workers; returns the workers with new copies."""
        try:
            self._join()
        except BaseException:
            self._undo()
            raise
        fresh = set()
        for worker, fetch in self._fetches.items():
            while not fetch.done() and worker not in lost_workers():
                concurrent.futures.wait([fetch], _LOOK_FOR_LOSSES_SECONDS)
            error = fetch.exception() if fetch.done() else None
            if error is not None and not is_of_worker(error):
                raise error
            if fetch.done() and error is None:
                fresh.add(worker)
        return fresh

    def abort(self) -> None:
        self._overlap.release(self._stamp, self._count)
        try:
            self._join()
        finally:
            concurrent.futures.wait(self._fetches.values(), _GIVE_UP_SECONDS)
            self._undo()

    def _join(self) -> None:
        if self._update is not None:
            self._update.result()

    def _undo(self) -> None:
        if self._can_undo:
            self._overlap.undo.restore()


class StepUpdates:
    def __init__(self, context: StepContext, functions: SyncFunctions) -> None:
        self._context, self._functions = context, functions
        # By worker: the state of what its copies are of.
        self._copies: dict[int, Any] = {}

    def function(self, calls: Sequence[tuple[SyncFunction, Any]], batch: Any) -> SyncFunction:
        """The `SyncFunction` of a step's update, which has an `overlap` if steps may.

        `calls` are those of the shares, each with its argument; `batch` is that of one of them.
        """
        function = calls[0][0]
        # TensorFlow cannot give new functions to all tasks if one is lost, and says so at length.
        if not self._context.overlap.is_on or self._context.scheduler.queue.lost:
            return function
        if any(one is not function for one, _ in calls):
            return function
        if writes.are_traced:
            warn_once(
                "a function of the script assigns to variables on parameter servers, which may "
                "happen between any two steps; steps do not overlap. Received: overlap_steps=True"
            )
            return function
        return self._functions.overlapping(function, batch) or function

    @property
    def _state(self) -> tuple[int, int]:
        return writes.count, self._context.extended.worker_states.losses

    def has_copies(self, worker: int) -> bool:
        return self._copies.get(worker) == self._state

    def begin(self, function: SyncFunction, stamp: int, count: int, scale: float) -> StepUpdate:
        """An attempt's update, which has started if all workers have copies."""
        readers: list[int] = []
        if function.overlap is not None:
            lost = self._context.scheduler.queue.lost
            readers = [w for w in range(self._context.num_workers) if w not in lost]
        update = StepUpdate(function, stamp, readers, self._context.totals)
        if function.overlap is not None and all(map(self.has_copies, readers)):
            update.is_early = True
            update.start(count, scale)
        return update

    def abort(self, update: StepUpdate) -> None:
        """Undoes an update that has started; gradients may be missing."""
        if update.is_early:
            self._forget()
            update.abort()

    def finish(self, update: StepUpdate, count: int, scale: float) -> None:
        """Makes an update, or waits until it is made, and workers have read it."""
        # Another model of the same weights has copies of its own.
        writes.count += 1
        state = self._state
        if not update.is_early:
            update.start(count, scale)
        fresh = update.finish(lambda: self._context.scheduler.queue.lost)
        if len(fresh) < len(update.readers):
            self._forget()
        self._copies = dict.fromkeys(fresh, state)

    def _forget(self) -> None:
        """Has workers read the servers next, and share nothing with functions under way."""
        writes.count += 1
        self._functions.begin_generation()


# The functions for a share, and what they are given of it.
_Call: TypeAlias = tuple[SyncFunction, Any]


class ReplicaStepClosure(Closure):
    """One worker's part of an attempt.

    It brings back the step's vector and what pushing has counted; the vector alone, if the gradient
    came too late; and nothing, if the worker did not begin with it, or `can_run` says that it has
    no copies to begin from.
    """

    after_loss = "no gradient counts twice"

    def __init__(
        self,
        functions: SyncFunction,
        args: tuple[Any, ...],
        about: str,
        on_done: Callable[[Any, Run], object],
        attempt: Attempt,
        share: int,
        can_run: Callable[[int], bool],
    ) -> None:
        super().__init__(functions.step.concrete, args, about, on_done)
        self._push = functions.push and functions.push.concrete
        self._attempt, self._share, self._can_run = attempt, share, can_run

    def run_on(self, calls: WorkerCalls) -> Any:
        if not self._can_run(calls.worker.index):
            self._attempt.is_void = True
        if self._attempt.is_over or (self._push is None and not self._is_admitted()):
            return ()
        if self._push is None:
            return super().run_on(calls)
        vector, gradients = super().run_on(calls)
        # Only now: what a step needs of its worker's time is what makes a gradient late.
        vector = to_chief(vector)
        if not self._is_admitted():
            return (vector,)
        stamp = scalar_tensor(self._attempt.stamp, tf.int64)
        return vector, calls.call(self._push, stamp, gradients)

    def _is_admitted(self) -> bool:
        return self._attempt.admit(self._share)


class SyncRunner(StepRunner):
    def __init__(
        self, context: StepContext, model: keras.Model, step: Callable[..., Any], is_training: bool
    ) -> None:
        super().__init__(context, model, step, is_training)
        self._updates = StepUpdates(context, self._functions)
        self._failures = 0
        # Those that the present step is cut for.
        self._workers = list(range(context.num_workers))

    def _make_functions(self, step: Callable[..., Any]) -> Any:
        collect = functools.partial(changes_and_logs, metrics=self._results)
        return SyncFunctions(self._context, step, collect, self._weights)

    def _submit(self, batches: Any, element_spec: Any, ticket: Ticket | None) -> None:
        """Takes a global step for each batch; the chief reads the data."""
        for batch in batches:
            begin = time.monotonic()
            self._take_step(batch)
            seconds = time.monotonic() - begin
            self._context.overlap.note(None if self._context.scheduler.queue.lost else seconds)

    def _take_step(self, batch: Any) -> None:
        before, self._workers = self._workers, self._context.scheduler.takers()
        if self._workers != before:
            names = ", ".join(f"worker-{worker}" for worker in self._workers)
            logger.info("batches are cut for %d workers from now on: %s", len(self._workers), names)
        shares = split(batch, len(self._workers))
        weights = [weight for weight, _ in shares]
        calls = [self._functions(share) for _, share in shares]
        step = calls[0][0].step
        totals = self._open(step)
        try:
            about = describe([batch], self._sent)
            attempt = self._complete(calls, weights, shares[0][1], about)
        except BaseException:
            self._context.attempts.failures += 1
            raise
        parts = np.array([weights[share] for share in attempt.results])
        vectors = np.stack(list(attempt.results.values()))
        self._add(self._sent, 1, step, vectors, parts / parts.sum())
        self._logs = self.logs | self.final_logs()
        self._context.attempts.count(attempt, len(shares))
        self._context.steps_by_worker.update(self._workers[share] for share in attempt.results)
        self._sent += 1
        totals.steps += 1

    def _complete(
        self, calls: list[_Call], weights: list[float], batch: Any, about: str
    ) -> Attempt:
        """Takes a step, as often as a worker is lost with it; returns the `Attempt`."""
        attempts = self._context.attempts
        is_unclean, self._failures = attempts.failures != self._failures, attempts.failures
        own = [function.sums(share) for function, share in calls if function.sums is not None]
        sums = np.sum(own, 0) if own else np.zeros(0)
        while True:
            function = self._updates.function(calls, batch)
            with self._context.scheduler.queue.holding():
                attempt = attempts.begin(len(calls), len(self._workers))
                if is_unclean:
                    self._functions.discard(attempt.stamp)
                self._try(attempt, calls, weights, sums, function, about)
            if not attempt.is_void:
                return attempt
            is_unclean = True
            logger.warning(
                "%s begins again, because a worker was lost with it; no weight has changed", about
            )

    def _try(
        self,
        attempt: Attempt,
        calls: list[_Call],
        weights: list[float],
        sums: np.ndarray,
        function: SyncFunction,
        about: str,
    ) -> None:
        """Lets workers compute and add up the gradients of a step, and makes the update."""
        updates, scheduler = self._updates, self._context.scheduler
        update = updates.begin(function, attempt.stamp, len(calls), 1.0 / sum(weights))
        try:
            closures = [
                self._start(attempt, share, call, weight, sums, update, f"{about}, share {share}")
                for share, (call, weight) in enumerate(zip(calls, weights))
            ]
            scheduler.wait_for(lambda: attempt.is_over or scheduler.queue.is_pausing)
            computed = time.time()
            attempt.is_void = attempt.is_void or not attempt.is_over
            scheduler.queue.withdraw(closures)
        except BaseException:
            # Only values of a lost server cannot be undone, and the error names that one.
            with contextlib.suppress(tf.errors.OpError):
                updates.abort(update)
            raise
        if attempt.is_void:
            updates.abort(update)
            return
        self._context.attempts.overlapped += update.is_early
        whole = sum(weights[share] for share in attempt.results)
        updates.finish(update, len(attempt.results), 1.0 / whole)
        self._context.times.end_step(computed, time.time())

    def _start(
        self,
        attempt: Attempt,
        share: int,
        call: _Call,
        weight: float,
        sums: np.ndarray,
        update: StepUpdate,
        about: str,
    ) -> ReplicaStepClosure:
        functions, payload = call
        functions = update.function if update.is_early else functions

        def done(result: Any, run: Run) -> None:
            if not result:
                return
            vector, _, taken = functions.step.add_costs(result[0], self._context.totals)
            is_late = len(result) == 1
            if functions.push is not None and not is_late:
                pushed = self._context.totals.add(functions.push.costs, np.asarray(result[1]))
                taken = taken.then(pushed)
            self._context.times.note_run(run, taken, 1, functions.step, is_open=True)
            if not is_late:
                attempt.finish(share, vector)

        assert self._totals is not None
        initial = np.concatenate(
            [self._totals.next_for(share), sums[::-1], [weight, attempt.stamp]]
        )
        closure = ReplicaStepClosure(
            functions,
            (tf.constant(initial), payload),
            about,
            done,
            attempt,
            share,
            lambda worker: not update.is_early or self._updates.has_copies(worker),
        )
        self._context.scheduler.queue.put(closure, self._workers[share])
        return closure


def split(batch: Any, num_workers: int) -> list[tuple[float, Any]]:
    """Cuts a global batch into pairs of a share's part and its batch."""
    world = core_batches.World(rank=0, local_replicas=num_workers, replicas=num_workers)
    shares = [
        (int(part.local_rows) / int(part.global_rows), part.data)
        for part in core_batches.split(batch, world).replicas
        if int(part.local_rows)
    ]
    return shares or [(1.0, batch)]
