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
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tensorflow as tf

from keras_psplus.log import logger
from keras_psplus.parameter_server.overlap.overlapping import OverlapState
from keras_psplus.parameter_server.steps.runner import StepRunner, describe
from keras_psplus.parameter_server.steps.step_logs import changes_and_logs
from keras_psplus.parameter_server.sync.replica_step_closure import ReplicaStepClosure
from keras_psplus.parameter_server.sync.sync_functions import SyncFunction, SyncFunctions

if TYPE_CHECKING:
    from keras_psplus.parameter_server.context import StepContext
    from keras_psplus.parameter_server.data.tickets import Ticket
    from keras_psplus.parameter_server.overlap.overlapped_update import PipelinedUpdate
    from keras_psplus.parameter_server.overlap.sync_overlap import OverlapFunctions
    from keras_psplus.parameter_server.scheduling.closures import Run
    from keras_psplus.parameter_server.sync.step_attempts import Attempt
    from keras_psplus.parameter_server.tracing.worker_function import ClosureVariable

# The functions for a share, and what they are given of it.
_Call: TypeAlias = tuple[SyncFunction, Any]


class SyncRunner(StepRunner):
    """Takes global steps and keeps the totals of metrics and seeds.

    Args:
        context: The strategy's `StepContext`.
        step: Function of one batch that returns a dict of scalar logs.
        weights: Function that returns variables which steps may be expected to read.
        results: As for `StepRunner`.
        split: Function of a batch and a number of workers. Returns the list of the shares that have
            rows, pairs of a share's part of all rows and its batch.
    """

    def __init__(
        self,
        context: StepContext,
        step: Callable[..., Any],
        weights: Callable[[], Iterable[tf.Variable]],
        results: Callable[[list[ClosureVariable]], Mapping[str, Any]],
        split: Callable[[Any, int], list[tuple[float, Any]]],
    ) -> None:
        super().__init__(context, step, weights, results, is_training=True)
        self._overlapping = OverlapState(context, self._functions)
        self._split = split
        self._failures = 0

    def _make_functions(
        self, step: Callable[..., Any], weights: Callable[[], Iterable[tf.Variable]]
    ) -> Any:
        collect = functools.partial(changes_and_logs, metrics=self._results)
        return SyncFunctions(self._context, step, collect, weights)

    def submit(self, batches: Any, element_spec: Any = None, ticket: Ticket | None = None) -> None:
        """Takes a global step for each batch.

        Args:
            batches: List of batches.
            element_spec: Unused: shares have fewer rows than the dataset's elements.
            ticket: None, as the chief reads the data.
        """
        for batch in batches:
            begin = time.monotonic()
            self._take_step(batch)
            self._context.overlap.note(time.monotonic() - begin)

    def _take_step(self, batch: Any) -> None:
        shares = self._split(batch, self._context.num_workers)
        weights = [weight for weight, _ in shares]
        calls = [self._functions(share) for _, share in shares]
        functions = calls[0][0]
        totals = self._open(functions.step)
        try:
            attempt = self._complete(calls, shares, describe([batch], self._sent))
        except BaseException:
            self._context.attempts.failures += 1
            raise
        parts = np.array([weights[share] for share in attempt.results])
        vectors = np.stack(list(attempt.results.values()))
        self._add(self._sent, 1, functions.step, vectors, parts / parts.sum())
        self._logs = self.logs | self.final_logs()
        self._context.attempts.count(attempt, len(shares))
        self._context.steps_by_worker.update(list(attempt.results))
        self._sent += 1
        totals.steps += 1

    def _complete(self, calls: list[_Call], shares: list[tuple[float, Any]], about: str) -> Attempt:
        """Takes a step, as often as a worker is lost with it; returns the `Attempt`."""
        attempts = self._context.attempts
        is_unclean, self._failures = attempts.failures != self._failures, attempts.failures
        while True:
            overlapped = self._overlapping.functions(calls, shares[0][1])
            with self._context.scheduler.queue.holding():
                attempt = attempts.begin(len(calls))
                if is_unclean:
                    self._functions.discard(attempt.stamp)
                self._try(attempt, calls, [weight for weight, _ in shares], overlapped, about)
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
        overlapped: OverlapFunctions | None,
        about: str,
    ) -> None:
        """Lets workers compute and add up the gradients of a step, and makes the update."""
        overlapping, scheduler = self._overlapping, self._context.scheduler
        on_copies = overlapped if overlapped and overlapping.all_have_copies() else None
        of_update = attempt.stamp, len(calls), 1.0 / sum(weights)
        update = overlapping.start(on_copies, *of_update) if on_copies else None
        try:
            closures = [
                self._start(attempt, share, call, weight, on_copies, f"{about}, share {share}")
                for share, (call, weight) in enumerate(zip(calls, weights))
            ]
            scheduler.wait_for(lambda: attempt.is_over or scheduler.queue.is_pausing)
            computed = time.time()
            attempt.is_void = attempt.is_void or not attempt.is_over
            scheduler.queue.withdraw(closures)
        except BaseException:
            if update is not None:
                # What cannot be undone lies on a server that is lost, and the error says so.
                with contextlib.suppress(tf.errors.OpError):
                    self._abort(update)
            raise
        if attempt.is_void:
            if update is not None:
                self._abort(update)
            return
        if overlapped is None:
            overlapping.forget_copies()
            whole = sum(weights[share] for share in attempt.results)
            calls[0][0].apply(attempt.stamp, len(attempt.results), 1.0 / whole)
        else:
            self._context.attempts.overlapped += update is not None
            overlapping.finish(update or overlapping.start(overlapped, *of_update))
        self._context.times.end_step(computed, time.time())

    def _abort(self, update: PipelinedUpdate) -> None:
        self._overlapping.forget()
        update.abort()

    def _start(
        self,
        attempt: Attempt,
        share: int,
        call: _Call,
        weight: float,
        on_copies: OverlapFunctions | None,
        about: str,
    ) -> ReplicaStepClosure:
        functions, payload = call
        step = functions.step if on_copies is None else on_copies.step

        def done(result: Any, run: Run) -> None:
            if not result:
                return
            vector, taken = step.add_costs(result[0], self._context.totals)
            is_late = len(result) == 1
            if functions.push is not None and not is_late:
                pushed = self._context.totals.add(functions.push.costs, np.asarray(result[1]))
                taken = taken.then(pushed)
            self._context.times.note_run(run, taken, 1, step, is_open=True)
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
            on_copies,
            self._overlapping.has_copies,
        )
        self._context.scheduler.queue.put(closure, share)
        return closure
