"""Synchronous training: all workers take each step together, from the same weights.

The chief cuts a global batch into shares, one for each worker. The parameter servers add up the
gradients; once those of a step are there, the chief lets the optimizer apply their mean, and the
next step begins. Nothing is applied before, so a worker that is lost costs the attempt at a step,
never half an update.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.base.optimizers import scalar_tensor
from keras_psplus.core.batch import batches as core_batches
from keras_psplus.log import logger
from keras_psplus.parameter_server.context import StepContext
from keras_psplus.parameter_server.scheduling.clocks import WorkerCalls
from keras_psplus.parameter_server.scheduling.queue import Closure, Run
from keras_psplus.parameter_server.steps.logs import changes_and_logs
from keras_psplus.parameter_server.steps.runner import StepRunner, describe
from keras_psplus.parameter_server.sync.overlap import SyncFunction
from keras_psplus.parameter_server.sync.step_attempts import Attempt
from keras_psplus.parameter_server.sync.step_update import StepUpdate, StepUpdates
from keras_psplus.parameter_server.sync.sync_functions import SyncFunctions
from keras_psplus.parameter_server.tracing.remote import to_chief
from keras_psplus.parameter_server.worker_data import Ticket

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
    """Takes global steps and keeps the totals of metrics and seeds."""

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
        while True:
            function = self._updates.function(calls, batch)
            with self._context.scheduler.queue.holding():
                attempt = attempts.begin(len(calls), len(self._workers))
                if is_unclean:
                    self._functions.discard(attempt.stamp)
                self._try(attempt, calls, weights, function, about)
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
        function: SyncFunction,
        about: str,
    ) -> None:
        """Lets workers compute and add up the gradients of a step, and makes the update."""
        updates, scheduler = self._updates, self._context.scheduler
        update = updates.begin(function, attempt.stamp, len(calls), 1.0 / sum(weights))
        try:
            closures = [
                self._start(attempt, share, call, weight, update, f"{about}, share {share}")
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
        initial = np.append(self._totals.next_for(share), [weight, attempt.stamp])
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
    """Cuts a global batch into pairs of a share's part of the rows and batch.

    Shares without rows are missing, unless none has any.
    """
    world = core_batches.World(rank=0, local_replicas=num_workers, replicas=num_workers)
    shares = [
        (int(part.local_rows) / int(part.global_rows), part.data)
        for part in core_batches.split(batch, world).replicas
        if int(part.local_rows)
    ]
    return shares or [(1.0, batch)]
