"""`fit` and `evaluate` under `ParameterServerStrategy`: steps go to the workers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_psplus.core.batch import batches
from keras_psplus.log import logger
from keras_psplus.parameter_server import reports
from keras_psplus.parameter_server.context import StepContext
from keras_psplus.parameter_server.data.tickets import Ticket
from keras_psplus.parameter_server.data.worker_data import WorkerIterator
from keras_psplus.parameter_server.steps.model_steps import compiled_step, tensors, weights
from keras_psplus.parameter_server.steps.runner import StepRunner
from keras_psplus.parameter_server.sync.sync_steps import SyncRunner
from keras_psplus.parameter_server.tracing.joined_batches import Batches, first_of
from keras_psplus.parameter_server.tracing.worker_function import ClosureVariable
from keras_psplus.parameter_server.updates import worker_updates
from keras_psplus.tables.row_variable import is_keyed


class TrainFunction:
    """A train or test function whose steps run on the workers, several at a time."""

    def __init__(
        self,
        model: keras.Model,
        context: StepContext,
        step_function: Callable[..., Any],
        is_training: bool,
    ) -> None:
        self._model, self._is_training = model, is_training
        self._context, self._scheduler = context, context.scheduler
        compiled = compiled_step(context.engine, model, step_function)
        step = _knowing_rows(model._autoconvert_optionals(compiled))
        if is_training:
            step = context.updating.wrap(model, step)
        is_sync = is_training and context.mode.is_sync
        args = context, step, lambda: weights(model), self._results
        self._runner = SyncRunner(*args) if is_sync else StepRunner(*args, is_training)
        # One dict for a whole epoch: Keras keeps the last that it got, and gets to see in it what
        # steps bring back later.
        self._logs: dict[str, Any] = {}
        self._is_reported = False
        self._bound = context.mode.bound if is_training else math.inf
        context.functions.add(self)

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
        if not self._runner.is_open:
            self._begin()
        began, reading, steps = time.time(), 0.0, 0
        count = self._model.steps_per_execution
        for wanted in [1] * count if self._goes_singly else [count]:
            since = time.time()
            batches, ticket = self._next(iterator, wanted)
            if not len(batches):
                break
            reading += time.time() - since if ticket is None else 0.0
            spec = _tensors_spec(getattr(iterator, "element_spec", None), batches)
            self._runner.submit(batches, spec, ticket)
            steps += len(batches)
        if not steps:
            # Keras does not synchronise when it runs out of data: the totals are written here.
            self.drain()
            raise StopIteration
        self._report_placement()
        self._logs.clear()
        self._logs.update(self._runner.logs)
        # Also if other steps have come back after that one.
        bad_loss = self._runner.take_bad_loss() if self._is_training else None
        if bad_loss is not None:
            self._logs["loss"] = bad_loss
        logs = self._logs
        if not isinstance(iterator, (tf.data.Iterator, WorkerIterator)):
            self.drain()
        if self._is_training:
            self._context.times.note_call(steps, began, began + reading)
        return logs, steps

    @property
    def _goes_singly(self) -> bool:
        """Whether workers are sent one step at a time.

        A limit of staleness counts steps, and rows of a dynamic table are updated after each.
        """
        tables = self._is_training and any(map(is_keyed, self._model.trainable_variables))
        return tables or self._bound != math.inf

    def _next(self, iterator: Any, count: int) -> tuple[Batches, Ticket | None]:
        """The next batches, none at the data's end, and their ticket if workers read."""
        if not isinstance(iterator, WorkerIterator):
            return _take(iterator, count), None
        ticket = self._scheduler.take(iterator, count)
        if ticket is None:
            return [], None
        if self._is_training:
            self._context.times.note_read(ticket.home, ticket.seconds)
        return ticket.batches, ticket

    def _begin(self) -> None:
        """Begins an epoch, goes on after a save, or takes a step of `train_on_batch`."""
        self._context.drain(but=self)
        self._scheduler.begin(self._bound)

    def _report_placement(self) -> None:
        """Logs the placement of the variables after the first step, which creates the last."""
        if self._is_training and not self._is_reported and self._context.extended._num_ps > 1:
            addresses = self._context.server_addresses()
            due = self._context.extended.placement.weights
            logger.info("%s", reports.report(addresses, due, self._model))
            reports.warn_of_whole_tensors(self._model)
        self._is_reported = True

    def begin_training(self) -> None:
        """Called when a `fit` begins, before its first step."""
        self.drain()
        self._runner.begin_training()

    def take_bad_loss(self) -> float | None:
        """Returns a non-finite loss that no batch's logs have shown, or None."""
        self.drain()
        return self._runner.take_bad_loss()

    def drain(self) -> None:
        """Waits for all steps; metrics and logs are those of all of them then."""
        if not self._runner.is_open:
            return
        began = time.time()
        self._runner.join()
        if self._is_training:
            self._context.times.note_wait(began)
        self._logs.update(self._runner.logs)
        self._logs.update(self._runner.final_logs())
        self._runner.close()
        self._logs = {}

    def _results(self, variables: list[ClosureVariable]) -> dict[str, Any]:
        """The results of metrics that have one of some variables, by names as in logs."""
        return _flat(
            {
                metric.name: metric.result()
                for metric in self._model.metrics
                if any(v._value is used for v in metric.variables for used in variables)
            }
        )


def _knowing_rows(step: Callable[..., Any]) -> Callable[..., Any]:
    def step_on(batch: Any) -> Any:
        with worker_updates.batch_rows.being(batches.rows_of(batch)):
            return step(batch)

    return step_on


def _flat(results: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in results.items():
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat


def _take(iterator: Any, count: int) -> list[Any]:
    batches: list[Any] = []
    for _ in range(count):
        try:
            batches.append(tensors(next(iterator)))
        except (StopIteration, tf.errors.OutOfRangeError):
            break
    return batches


def _tensors_spec(element_spec: Any, batches: Batches) -> Any:
    """The dataset's element specification in the form of `tensors`, if it describes batches."""
    if element_spec is None:
        return None
    while isinstance(element_spec, tuple) and len(element_spec) > 1:
        if not isinstance(element_spec[-1], tf.OptionalSpec):
            break
        element_spec = element_spec[:-1]
    try:
        tf.nest.assert_same_structure(element_spec, first_of(batches), expand_composites=True)
    except (TypeError, ValueError):
        return None
    return element_spec
