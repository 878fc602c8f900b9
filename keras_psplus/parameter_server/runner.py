"""`fit`, `evaluate` and `predict`: steps go to the workers, and results add up."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.base.optimizers import scalar_tensor
from keras_psplus.keras_internals.keras_parts import tf_trainer, tree
from keras_psplus.log import logger, warn_once
from keras_psplus.parameter_server import worker_function
from keras_psplus.parameter_server.context import StepContext
from keras_psplus.parameter_server.data import Ticket, WorkerIterator
from keras_psplus.parameter_server.dynamic_table import PlacedTable
from keras_psplus.parameter_server.extended import report, warn_of_whole_tensors
from keras_psplus.parameter_server.queue import Closure, Run, WorkerCalls
from keras_psplus.parameter_server.step_functions import (
    ClosureTotals,
    ComputedLogs,
    StepFunctions,
    TracedStep,
    are_same,
    changes_and_logs,
    compiled_step,
    next_batches,
    results_of,
    spec_of_tensors,
    tensors,
    weights,
)
from keras_psplus.parameter_server.worker_function import Batches, ClosureVariable, Trace, first_of
from keras_psplus.tables.chunks import traced
from keras_psplus.tables.local import outside
from keras_psplus.tables.row_variable import is_keyed
from keras_psplus.tf_internals import tensor_conversion_registry

# Updates of dynamic tables by what workers' runs have left on the parameter servers.


_numbers = itertools.count(1)


class RowUpdates:
    """Functions of the chief that update tables; lost runs leave a rest on the servers."""

    def __init__(self, tables: Sequence[PlacedTable]) -> None:
        self._shards = [shard for table in tables for shard in table.shards]
        self._take: Any = outside(lambda: traced(self._take_all, tf.TensorSpec([], tf.int64)))
        self.has_rest = False

    def _take_all(self, number: tf.Tensor) -> tf.Tensor:
        for shard in self._shards:
            shard.take(number)
        return number

    def take(self, number: int) -> None:
        with tf.device(worker_function.CHIEF):
            worker_function.call(self._take, scalar_tensor(number, tf.int64))

    def forget_rest(self) -> None:
        if self.has_rest:
            self.has_rest = False
            for shard in self._shards:
                shard.clear()


class RowClosure(Closure):
    """A step of one worker that also updates rows of dynamic tables."""

    def __init__(
        self,
        updates: RowUpdates,
        concrete: tf.types.experimental.ConcreteFunction,
        args: tuple[Any, ...],
        about: str,
        on_done: Callable[..., object],
    ) -> None:
        super().__init__(concrete, args, about, on_done)
        self._updates, self._number = updates, 0

    def run_on(self, calls: WorkerCalls) -> Any:
        # Another one each time that a worker is given it.
        self._number = next(_numbers)
        try:
            return self._call_with(self._number, calls)
        except BaseException:
            self._updates.has_rest = True
            raise

    def commit(self) -> None:
        self._updates.take(self._number)


# The parts of a step that one worker takes.
_WHOLE = np.ones(1)


class StepRunner:
    """A train or test function whose steps run on single workers, several at a time."""

    def __init__(
        self, context: StepContext, model: keras.Model, step: Callable[..., Any], is_training: bool
    ) -> None:
        self._context, self._model, self._is_training = context, model, is_training
        self._weights = functools.partial(weights, model)
        self._results = functools.partial(results_of, model)
        self._computed_logs: dict[int, ComputedLogs] = {}
        self._row_updates: dict[int, RowUpdates] = {}
        self._functions: Any = self._make_functions(step)
        self._bound = context.mode.bound if is_training else math.inf
        self._lock = threading.Lock()
        self._sent = 0
        self._bad_loss: float | None = None
        self._is_reported = False
        # One dict for a whole epoch: Keras keeps the last that it got, and gets to see in it what
        # steps bring back later.
        self._shown_logs: dict[str, Any] = {}
        # Of the steps of an epoch before, in the same `fit`: what the logs were, and how often a
        # step drew a seed.
        self._known: tuple[list[ClosureVariable], Any, dict[str, Any]] | None = None
        self._clear()
        context.functions.add(self)

    def _make_functions(self, step: Callable[..., Any]) -> Any:
        make = functools.partial(
            StepFunctions, self._context, step, changes_and_logs, self._weights
        )
        return {overlap: make(overlap=overlap) for overlap in (False, True)}

    def _clear(self) -> None:
        # Of the steps that have been sent since `drain`.
        self._totals: ClosureTotals | None = None
        self._logs: dict[str, Any] | None = None
        # Of the last batch whose step has returned, however steps overtake one another: its
        # number, its function, what its logs are computed from, and what it added to the totals.
        self._last: tuple[int, TracedStep, np.ndarray, np.ndarray] | None = None
        self._returned, self._round_began = 0, 0.0

    def __call__(self, iterator: Any) -> dict[str, Any]:
        progress = self._context.progress
        progress.begin("training step" if self._is_training else "evaluation step")
        try:
            logs, steps = self._take_steps(iterator)
        finally:
            progress.end()
        if self._is_training:
            progress.count(steps)
        return logs

    def _take_steps(self, iterator: Any) -> tuple[dict[str, Any], int]:
        if self._totals is None:
            # Begins an epoch, goes on after a save, or takes a step of `train_on_batch`.
            self._context.drain(but=self)
            self._context.scheduler.begin(self._bound)
        began, reading, steps = time.time(), 0.0, 0
        count = self._model.steps_per_execution
        for wanted in [1] * count if self._goes_singly else [count]:
            since = time.time()
            batches, ticket = self._next(iterator, wanted)
            if not len(batches):
                break
            reading += time.time() - since if ticket is None else 0.0
            spec = spec_of_tensors(getattr(iterator, "element_spec", None), first_of(batches))
            self._submit(batches, spec, ticket)
            steps += len(batches)
        if not steps:
            # Keras does not synchronise when it runs out of data: the totals are written here.
            self.drain()
            raise StopIteration
        self._report_placement()
        logs = self._shown_logs
        logs.clear()
        logs.update(self.logs)
        # Also if other steps have come back after that one.
        bad_loss = self._pop_bad_loss() if self._is_training else None
        if bad_loss is not None:
            logs["loss"] = bad_loss
        if not isinstance(iterator, (tf.data.Iterator, WorkerIterator)):
            self.drain()
        if self._is_training:
            self._context.times.note_call(steps, began, began + reading)
        return logs, steps

    @property
    def _goes_singly(self) -> bool:
        """Whether workers are sent single steps: a limit counts them, or rows change."""
        tables = self._is_training and any(map(is_keyed, self._model.trainable_variables))
        return tables or self._bound != math.inf

    def _next(self, iterator: Any, count: int) -> tuple[Batches, Ticket | None]:
        if not isinstance(iterator, WorkerIterator):
            return next_batches(iterator, count), None
        ticket = self._context.scheduler.take(iterator, count)
        if ticket is None:
            return [], None
        if self._is_training:
            self._context.times.note_read(ticket.home, ticket.seconds)
        return ticket.batches, ticket

    def _report_placement(self) -> None:
        """Logs the placement of the variables after the first step, which creates the last."""
        context = self._context
        if self._is_training and not self._is_reported and context.extended._num_ps > 1:
            due = context.extended.placement.weights
            logger.info("%s", report(context.server_addresses(), due, self._model))
            warn_of_whole_tensors(self._model)
        self._is_reported = True

    def begin_training(self) -> None:
        """Called when a `fit` begins: the logs of a training before say nothing of it."""
        self.drain()
        with self._lock:
            self._known = self._bad_loss = None

    def take_bad_loss(self) -> float | None:
        self.drain()
        return self._pop_bad_loss()

    def _pop_bad_loss(self) -> float | None:
        with self._lock:
            bad_loss, self._bad_loss = self._bad_loss, None
            return bad_loss

    def drain(self) -> None:
        """Waits for all steps; metrics and logs are those of all of them then."""
        if self._totals is None:
            return
        began = time.time()
        self._join()
        if self._is_training:
            self._context.times.note_wait(began)
        self._shown_logs.update(self.logs | self.final_logs())
        for updates in self._row_updates.values():
            updates.forget_rest()
        self._write_totals()
        self._sent, self._shown_logs = 0, {}

    def _submit(self, batches: Batches, element_spec: Any, ticket: Ticket | None) -> None:
        """Sends one closure with a step for each batch; waits if enough are under way."""
        # Batches that workers read stay on the workers, unpacked.
        functions = self._functions[self._is_training and self._context.overlap.is_on]
        step, payload = functions(batches, element_spec, join=ticket is None)
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
            step.turns,
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
            self._join()
            self._write_totals()
        with self._lock:
            if self._totals is None:
                draws = None
                if self._known is not None and are_same(step.variables, self._known[0]):
                    _, draws, self._logs = self._known
                self._totals = ClosureTotals(step.variables, draws)
                self._round_began = time.monotonic()
            return self._totals

    def _wait_for_earlier_steps(self, overwritten: Iterable[ClosureVariable]) -> None:
        names = ", ".join(sorted({variable.name.split(":")[0] for variable in overwritten}))
        if self._context.num_workers > 1:
            warn_once(
                "metric state that a step replaces instead of adding to it (%s) makes every step "
                "wait for the one before: one worker at a time. Write such metrics as sums, or "
                "leave them out of compile().",
                names,
            )
        self._context.scheduler.join()

    @property
    def logs(self) -> dict[str, Any]:
        """The logs of the last batch whose step has returned, of totals over all workers."""
        with self._lock:
            return dict(self._logs or {})

    def _join(self) -> None:
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
        vector, pending, costs = step.add_costs(result[0], self._context.totals)
        self._context.updating.note_pending(pending, run.worker)
        with self._lock:
            if self._totals is not None and self._is_training:
                self._context.steps_by_worker[run.worker] += count
                self._context.times.note_run(run, costs, count, step)
                self._note_round()
        self._add(number, count, step, vector[None], _WHOLE)

    def _note_round(self) -> None:
        """Notes how long as many steps took as there are workers, each with one."""
        self._returned += 1
        if self._returned % self._context.num_workers:
            return
        now, before = time.monotonic(), self._round_began
        self._round_began = now
        self._context.overlap.note(None if self._context.scheduler.queue.lost else now - before)

    def _add(
        self, number: int, count: int, step: TracedStep, vectors: np.ndarray, parts: np.ndarray
    ) -> None:
        """Adds steps to the totals, and makes their logs.

        `vectors` and `parts` have those of each share of a step, and its part of the rows.
        """
        changes, values, inputs = step.notes.split(vectors)
        with self._lock:
            if self._totals is None:
                return
            change = self._totals.add(changes, parts, count, step.overwritten)
            logs = step.notes.logs(parts @ values)
            if self._last is None or number > self._last[0]:
                self._last = number, step, parts @ inputs, change
                self._logs = logs
            loss = logs.get("loss")
            if loss is not None and not np.all(np.isfinite(loss)):
                self._bad_loss = loss


def describe(batches: Batches, first: int) -> str:
    """Number and form of batches, for messages; of joined ones, the form of all together."""
    last = first + len(batches) - 1
    numbers = f"batch {first}" if first == last else f"batches {first} to {last}"
    leaves = [leaf for leaf in tf.nest.flatten(first_of(batches)) if isinstance(leaf, tf.Tensor)]
    tensors = ", ".join(f"{leaf.dtype.name}{leaf.shape.as_list()}" for leaf in leaves)
    return f"{numbers} (counted from 0), of {tensors}"


class PredictFunction:
    def __init__(self, context: StepContext, model: keras.Model) -> None:
        compiled = compiled_step(context.engine, model, model.predict_step)
        step = model._autoconvert_optionals(compiled)
        self._functions = StepFunctions(context, step, _concatenated, lambda: weights(model))
        self._context, self._sent = context, 0
        self._totals: ClosureTotals | None = None
        context.functions.add(self)

    def __call__(self, batches: Any) -> Any:
        batches = [tensors(batch) for batch in batches]
        function, payload = self._functions(batches)
        if self._totals is None or not are_same(self._totals.variables, function.variables):
            self.drain()
            self._totals = ClosureTotals(function.variables)
        result = self._context.scheduler.submit(
            function.concrete,
            (tf.constant(self._totals.next), payload),
            lambda result, _: function.add_costs(result[0], self._context.totals),
            f"predict(), {describe(batches, self._sent)}",
        )
        self._sent += len(batches)
        self._totals.steps += len(batches)
        if self._totals.has_seeds and self._totals.draws is None:
            self._totals.note_draws(function.split(result.get()[0])[0], len(batches))
        outputs = function.concrete.structured_outputs[1]
        if any(not isinstance(output, tf.Tensor) for output in tf.nest.flatten(outputs)):
            return result.get()[1]
        places = tf.nest.pack_sequence_as(outputs, range(len(tf.nest.flatten(outputs))))
        return tree.map_structure(lambda place: _Awaited(result, place), places)

    def drain(self) -> None:
        """Leaves seeds where they would be after as many steps here."""
        if self._totals is not None and self._totals.has_seeds:
            self._totals.write()
        self._sent, self._totals = 0, None


def _concatenated(trace: Trace, outputs: list[Any]) -> tuple[tf.Tensor, Any, Any]:
    result = outputs[0]
    if len(outputs) > 1:
        result = tree.map_structure(lambda *parts: tf_trainer.concat(list(parts)), *outputs)
    return trace.changes(), result, ()


class _Awaited:
    def __init__(self, result: Closure, place: int) -> None:
        self._result, self._place = result, place

    def _tensor(self) -> Any:
        return tf.nest.flatten(self._result.get()[1])[self._place]

    def numpy(self) -> Any:
        return self._tensor().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def __getitem__(self, key: Any) -> Any:
        return self._tensor()[key]

    def __len__(self) -> int:
        return len(self._tensor())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor(), name)


tensor_conversion_registry.register_tensor_conversion_function(
    _Awaited, lambda value, dtype=None, name=None, as_ref=False: value._tensor()
)
