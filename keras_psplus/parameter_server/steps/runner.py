"""Runs a model's steps on the workers and keeps totals of their results."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_psplus.log import warn_once
from keras_psplus.parameter_server.steps.step_functions import StepFunctions
from keras_psplus.parameter_server.steps.step_logs import ComputedLogs, changes_and_logs
from keras_psplus.parameter_server.tracing.joined_batches import Batches, first_of
from keras_psplus.parameter_server.tracing.worker_function import ClosureVariable, pack, unpack

if TYPE_CHECKING:
    from keras_psplus.parameter_server.context import StepContext
    from keras_psplus.parameter_server.data.tickets import Ticket


class StepRunner:
    """Sends train or test steps and keeps the totals of metrics and seeds.

    Args:
        context: The strategy's `StepContext`.
        step: Function of one batch that returns a dict of scalar logs.
        weights: Function that returns variables which steps may be expected to read.
        results: Function of closure variables that returns a flat dict of results of metrics.
        overlap: Whether a worker may begin with a step before it is done with the one before.
        counts: Counter that steps are added to by worker, or None.
    """

    def __init__(
        self,
        context: StepContext,
        step: Callable[..., Any],
        weights: Callable[[], Iterable[tf.Variable]],
        results: Callable[[list[ClosureVariable]], Mapping[str, Any]],
        overlap: bool = False,
        counts: collections.Counter[int] | None = None,
    ) -> None:
        self._context, self._results, self._counts = context, results, counts
        self._computed_logs: dict[int, ComputedLogs] = {}
        self._functions: Any = StepFunctions(
            context,
            step,
            context.updating.with_pending(changes_and_logs),
            weights,
            overlap=overlap,
        )
        self._lock = threading.Lock()
        self._sent = 0
        self._bad_loss = None
        # Of the steps of an epoch before, in the same `fit`: what the logs were, and how often a
        # step drew a seed.
        self._known: tuple[list[ClosureVariable], Any, dict[str, Any]] | None = None
        self._clear()

    def _clear(self):
        self._variables, self._totals = None, None
        self._steps, self._draws = 0, None
        self._logs = None
        # Of the last batch whose step has returned, however steps overtake one another: its
        # number, its function, what its logs are computed from, and what it added to the totals.
        self._last: tuple[int, Any, np.ndarray, np.ndarray] | None = None

    def submit(
        self, batches: Batches, element_spec: Any = None, ticket: Ticket | None = None
    ) -> None:
        """Sends one closure with a step for each batch; waits if enough are under way.

        Args:
            batches: List of batches, or `JoinedBatches`.
            element_spec: Type specification of the dataset's elements, if there is one.
            ticket: `tickets.Ticket` that they are from, if the workers read them.
        """
        # Batches that workers read stay on the workers, unpacked.
        function, payload = self._functions(batches, element_spec, join=ticket is None)
        variables = function.variables
        if self._variables is not None and not are_same(variables, self._variables):
            # A batch of another form, whose function meets the variables in another order.
            self.join()
            self._write_totals()
        if function.overwritten:
            self._wait_for_earlier_steps(function.overwritten)
        with self._lock:
            if self._totals is None:
                self._variables, self._totals = variables, pack(variables)
                self._begin_as_before(variables)
            initial = self._totals + self._seeds_after(self._steps)
            self._steps += len(batches)
        count, number = len(batches), self._sent
        self._context.scheduler.submit(
            function.concrete,
            (tf.constant(initial), payload),
            lambda result, run: self._add(number, count, function, result[0].numpy(), run),
            describe(batches, number),
            ticket,
            function.may_overlap,
        )
        self._sent += count
        if self._logs is None:
            # The first step shows what the logs are called, and how often a step draws a seed.
            self._context.scheduler.wait_for(lambda: self._logs is not None)

    def _begin_as_before(self, variables):
        """Starts an epoch on all workers at once, if earlier steps have shown their outputs.

        Until a step of this epoch has returned, the logs are those of the epoch before.
        """
        if self._known is not None and are_same(variables, self._known[0]):
            _, self._draws, self._logs = self._known

    def _wait_for_earlier_steps(self, overwritten):
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

    @property
    def variables(self) -> list[ClosureVariable]:
        """The closure variables that the steps use."""
        return list(self._variables or [])

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
        if self._last is None:
            return {}
        _, function, inputs, changes = self._last
        # As one process has them, for whom the last batch is the last step.
        return self._compute_logs(function, self._totals, self._totals - changes, inputs)

    def _compute_logs(self, function, totals, before, inputs):
        if id(function) not in self._computed_logs:
            self._computed_logs[id(function)] = ComputedLogs(function, self._results)
        return self._computed_logs[id(function)](totals, before, inputs)

    def close(self) -> None:
        """Writes the totals to the chief's variables, once all steps are back."""
        self._write_totals()
        self._sent = 0

    def _write_totals(self):
        with self._lock:
            if self._totals is not None:
                if self._logs is not None:
                    self._known = self._variables, self._draws, self._logs
                unpack(self._variables, self._totals + self._seeds_after(self._steps))
        self._clear()

    def _add(self, number, count, function, result, run):
        result, counts = function.split(result)
        costs = self._context.totals.add(function.costs, counts)
        result = self._context.updating.take_pending(result, run.worker)
        with self._lock:
            if self._totals is None:
                return
            if self._counts is not None:
                self._counts[run.worker] += count
                self._context.times.note_run(run, costs, count, function)
            changes, values, inputs = function.notes.split(result)
            is_seed = self._is_seed()
            if self._draws is None:
                self._draws = np.where(is_seed, changes / count, 0.0)
            changes = np.where(is_seed, 0.0, changes)
            self._totals = self._totals + changes
            names = function.notes.names
            logs = {name: value.astype(dtype) for (name, dtype), value in zip(names, values)}
            if self._last is None or number > self._last[0]:
                self._last = number, function, inputs, changes
                self._logs = logs
            loss = logs.get("loss")
            if loss is not None and not np.isfinite(loss):
                self._bad_loss = loss

    def _is_seed(self):
        return self._flags(lambda variable: variable.is_seed)

    def _flags(self, of_variable):
        flags = [np.full(v.shape.num_elements(), of_variable(v)) for v in self._variables]
        return np.concatenate([np.zeros(0, bool), *flags])

    def _seeds_after(self, steps):
        """Advance of seeds after some steps, so that no two steps draw the same."""
        return 0.0 if self._draws is None else self._draws * steps


def are_same(variables: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects in the same order."""
    return len(variables) == len(others) and all(a is b for a, b in zip(variables, others))


def describe(batches: Batches, first: int) -> str:
    """Number and form of batches, for messages; of joined ones, the form of all together."""
    last = first + len(batches) - 1
    numbers = f"batch {first}" if first == last else f"batches {first} to {last}"
    leaves = [leaf for leaf in tf.nest.flatten(first_of(batches)) if isinstance(leaf, tf.Tensor)]
    tensors = ", ".join(f"{leaf.dtype.name}{leaf.shape.as_list()}" for leaf in leaves)
    return f"{numbers} (counted from 0), of {tensors}"
