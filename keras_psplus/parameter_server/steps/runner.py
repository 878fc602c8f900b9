"""Runs a model's steps on the workers and keeps totals of their results."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus.log import warn_once
from keras_psplus.parameter_server.context import StepContext
from keras_psplus.parameter_server.data.tickets import Ticket
from keras_psplus.parameter_server.scheduling.closures import Closure, Run
from keras_psplus.parameter_server.steps.closure_totals import ClosureTotals, are_same
from keras_psplus.parameter_server.steps.row_updates import RowClosure, RowUpdates
from keras_psplus.parameter_server.steps.step_functions import StepFunctions, TracedStep
from keras_psplus.parameter_server.steps.step_logs import ComputedLogs, changes_and_logs
from keras_psplus.parameter_server.tracing.joined_batches import Batches, first_of
from keras_psplus.parameter_server.tracing.worker_function import ClosureVariable

# The parts of a step that one worker takes.
_WHOLE = np.ones(1)


class StepRunner:
    """Sends train or test steps to single workers and keeps the totals of their results.

    Args:
        weights: Function that returns variables which steps may be expected to read.
        results: Function of closure variables that returns a flat dict of results of metrics.
        is_training: Whether steps count as those of training, and may overlap.
    """

    def __init__(
        self,
        context: StepContext,
        step: Callable[..., Any],
        weights: Callable[[], Iterable[tf.Variable]],
        results: Callable[[list[ClosureVariable]], Mapping[str, Any]],
        is_training: bool,
    ) -> None:
        self._context, self._results, self._is_training = context, results, is_training
        self._computed_logs: dict[int, ComputedLogs] = {}
        self._row_updates: dict[int, RowUpdates] = {}
        self._functions: Any = self._make_functions(step, weights)
        self._lock = threading.Lock()
        self._sent = 0
        self._bad_loss: float | None = None
        # Of the steps of an epoch before, in the same `fit`: what the logs were, and how often a
        # step drew a seed.
        self._known: tuple[list[ClosureVariable], Any, dict[str, Any]] | None = None
        self._clear()

    def _make_functions(
        self, step: Callable[..., Any], weights: Callable[[], Iterable[tf.Variable]]
    ) -> Any:
        context = self._context
        collect = context.updating.with_pending(changes_and_logs)
        overlap = self._is_training and context.overlap.is_on
        return StepFunctions(context, step, collect, weights, overlap=overlap)

    def _clear(self) -> None:
        self._totals: ClosureTotals | None = None
        self._logs: dict[str, Any] | None = None
        # Of the last batch whose step has returned, however steps overtake one another: its
        # number, its function, what its logs are computed from, and what it added to the totals.
        self._last: tuple[int, TracedStep, np.ndarray, np.ndarray] | None = None

    def submit(
        self, batches: Batches, element_spec: Any = None, ticket: Ticket | None = None
    ) -> None:
        """Sends one closure with a step for each batch; waits if enough are under way.

        The ticket is that of batches which workers have read.
        """
        # Batches that workers read stay on the workers, unpacked.
        step, payload = self._functions(batches, element_spec, join=ticket is None)
        totals = self._open(step)
        if step.overwritten:
            self._wait_for_earlier_steps(step.overwritten)
        count, number = len(batches), self._sent
        with self._lock:
            initial = totals.next
            totals.steps += count
        self._context.scheduler.submit(
            step.concrete,
            (tf.constant(initial), payload),
            lambda result, run: self._take_result(number, count, step, result, run),
            describe(batches, number),
            ticket,
            step.may_overlap,
            functools.partial(RowClosure, self._updates_of(step)) if step.tables else Closure,
        )
        self._sent += count
        if self._logs is None:
            # The first step shows what the logs are called, and how often a step draws a seed.
            self._context.scheduler.wait_for(lambda: self._logs is not None)

    def _updates_of(self, step: TracedStep) -> RowUpdates:
        if id(step) not in self._row_updates:
            self._row_updates[id(step)] = RowUpdates(step.tables)
        return self._row_updates[id(step)]

    def _open(self, step: TracedStep) -> ClosureTotals:
        """The totals that a step adds to.

        An epoch starts on all workers at once, if earlier steps have shown their outputs: until a
        step of this epoch has returned, the logs are those of the epoch before.
        """
        if self._totals is not None and not are_same(self._totals.variables, step.variables):
            # A batch of another form, whose function meets the variables in another order.
            self.join()
            self._write_totals()
        with self._lock:
            if self._totals is None:
                draws = None
                if self._known is not None and are_same(step.variables, self._known[0]):
                    _, draws, self._logs = self._known
                self._totals = ClosureTotals(step.variables, draws)
            return self._totals

    def _wait_for_earlier_steps(self, overwritten: Iterable[ClosureVariable]) -> None:
        """Steps of which each needs what the last one left cannot be under way together."""
        names = ", ".join(sorted({variable.name.split(":")[0] for variable in overwritten}))
        if self._context.num_workers > 1:
            warn_once(
                "metric state that a step replaces instead of adding to it (%s) makes every step "
                "wait for the one before: one worker at a time. Write such metrics as sums, or "
                "leave them out of compile().",
                names,
            )
        if self._context.scheduler.is_busy:
            self._context.scheduler.join()

    @property
    def logs(self) -> dict[str, Any]:
        """The logs of the last batch whose step has returned, of totals over all workers."""
        with self._lock:
            return dict(self._logs or {})

    def begin_training(self) -> None:
        """Forgets the logs of a training before: they say nothing of the one that begins."""
        with self._lock:
            self._known = self._bad_loss = None

    def take_bad_loss(self) -> float | None:
        """Returns and clears a non-finite loss of the steps since the last call."""
        with self._lock:
            bad_loss, self._bad_loss = self._bad_loss, None
            return bad_loss

    @property
    def is_open(self) -> bool:
        """Whether steps have been sent since the last `close`."""
        return self._totals is not None

    def join(self) -> None:
        """Waits for all steps; on a worker's error, gives up the totals and raises it."""
        try:
            self._context.scheduler.join()
        except Exception:
            self._clear()
            self._sent = 0
            raise

    def final_logs(self) -> dict[str, Any]:
        """Logs computed from the metrics of all steps, once all have returned."""
        if self._last is None or self._totals is None:
            return {}
        # As one process has them, for whom the last batch is the last step.
        _, step, inputs, change = self._last
        if id(step) not in self._computed_logs:
            self._computed_logs[id(step)] = ComputedLogs(step, self._results)
        values = self._totals.values
        return self._computed_logs[id(step)](values, values - change, inputs)

    def close(self) -> None:
        """Writes the totals to the chief's variables, once all steps are back."""
        for updates in self._row_updates.values():
            updates.forget_rest()
        self._write_totals()
        self._sent = 0

    def _write_totals(self) -> None:
        with self._lock:
            if (totals := self._totals) is not None:
                if self._logs is not None:
                    self._known = totals.variables, totals.draws, self._logs
                totals.write()
        self._clear()

    def _take_result(
        self, number: int, count: int, step: TracedStep, result: Any, run: Run
    ) -> None:
        vector, costs = step.add_costs(result[0], self._context.totals)
        vector = self._context.updating.take_pending(vector, run.worker)
        with self._lock:
            if self._totals is not None and self._is_training:
                self._context.steps_by_worker[run.worker] += count
                self._context.times.note_run(run, costs, count, step)
        self._add(number, count, step, vector[None], _WHOLE)

    def _add(
        self, number: int, count: int, step: TracedStep, vectors: np.ndarray, parts: np.ndarray
    ) -> None:
        """Adds steps to the totals, and makes their logs.

        Args:
            number: Number of their first batch.
            vectors: The vector of each share of a step, a matrix.
            parts: Each share's part of the rows.
        """
        changes, values, inputs = step.notes.split(vectors)
        with self._lock:
            if self._totals is None:
                return
            change = self._totals.add(changes, parts, count, step.overwritten)
            names = step.notes.names
            logs = {n: value.astype(dtype) for (n, dtype), value in zip(names, parts @ values)}
            if self._last is None or number > self._last[0]:
                self._last = number, step, parts @ inputs, change
                self._logs = logs
            loss = logs.get("loss")
            if loss is not None and not np.isfinite(loss):
                self._bad_loss = loss


def describe(batches: Batches, first: int) -> str:
    """Number and form of batches, for messages; of joined ones, the form of all together."""
    last = first + len(batches) - 1
    numbers = f"batch {first}" if first == last else f"batches {first} to {last}"
    leaves = [leaf for leaf in tf.nest.flatten(first_of(batches)) if isinstance(leaf, tf.Tensor)]
    tensors = ", ".join(f"{leaf.dtype.name}{leaf.shape.as_list()}" for leaf in leaves)
    return f"{numbers} (counted from 0), of {tensors}"
