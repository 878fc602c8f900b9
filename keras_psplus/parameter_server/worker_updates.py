"""Gradient accumulation on workers, and the chief's record of it.

Each worker sums the gradients of the batches that it happens to run, and updates when they are
enough, independently of the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_psplus.core.base.optimizers import unwrapped
from keras_psplus.core.base.threads import ThreadFlag, ThreadValue
from keras_psplus.core.batch import duplicate_rows
from keras_psplus.core.graph.stand_ins import Gradient
from keras_psplus.log import logger
from keras_psplus.parameter_server.context import StepContext
from keras_psplus.parameter_server.scheduling.queue import Closure, Run
from keras_psplus.parameter_server.scheduling.scheduler import weakly
from keras_psplus.parameter_server.state import WorkerVariables
from keras_psplus.parameter_server.steps.step_functions import StepFunctions
from keras_psplus.parameter_server.tracing.worker_function import NOTHING_KEPT, current_trace, pack
from keras_psplus.updates import Updates, map_values
from keras_psplus.updates.base import Context, Form

# Raised by a thread while an optimizer is given sums, not a batch's gradients.
applying_flag = ThreadFlag()


# Number of rows of the batch whose step is traced, an int or a scalar; None if it has none.
batch_rows: ThreadValue[int | tf.Tensor] = ThreadValue()


class _Unit(NamedTuple):
    """Variables of an optimizer whose gradients are summed together, by name.

    Without the variables, other ones might come to have their ids. With `is_by_rows`, batches count
    by their rows, and a flush updates.
    """

    name: str
    policy: Updates
    forms: list[Form | None]
    variables: list[keras.Variable]
    is_by_rows: bool
    optimizer: weakref.ref[keras.optimizers.Optimizer]


class WorkerUpdates:
    """Gradient accumulation by `updates` or by Keras's `gradient_accumulation_steps`."""

    _LOST = (
        "worker-%d was lost with the gradients of %d batch(es) that it had summed and not sent "
        "yet; they are missing from training"
    )

    def __init__(self, context: StepContext, policy: Updates | None) -> None:
        self.policy = policy
        self._context: Callable[[], Any] = weakref.ref(context)
        self._units = weakref.WeakKeyDictionary[
            keras.optimizers.Optimizer, dict[tuple[int, ...], _Unit]
        ]()
        self._on_all_workers = weakref.WeakKeyDictionary[
            keras.optimizers.Optimizer, tuple[int, Any]
        ]()
        self._finished = weakref.WeakKeyDictionary[keras.optimizers.Optimizer, int]()
        self._pending: dict[int, int] = {}
        self._steps, self._are_steps_counted = 0, True
        # Threads hold the queue.
        context.scheduler.queue.on_lost = weakly(self._note_loss)

    def wrap(self, model: keras.Model, step: Callable[..., Any]) -> Callable[..., Any]:
        """A model's step as workers take it: on their copies if `updates` is local."""
        return step

    def take(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[Gradient | None],
        variables: Sequence[keras.Variable],
    ) -> bool:
        """Takes the gradients of a batch, in the function of a worker.

        Returns:
            Whether it has; otherwise the optimizer applies them to its worker's copies.

        Raises:
            ValueError: If the worker has no copies of what the optimizer changes.
        """
        assert self.policy is not None
        # Another worker's update may change the scale between this worker's batches.
        gradients = _times_scale(optimizer, gradients, is_inverse=True)
        self.accumulate(
            optimizer,
            self.policy,
            gradients,
            variables,
            lambda means, of: _apply(optimizer, means, of),
            is_by_rows=True,
        )
        return True

    def accumulate(
        self,
        optimizer: keras.optimizers.Optimizer,
        policy: Updates,
        gradients: Sequence[Gradient | None],
        variables: Sequence[keras.Variable],
        apply: Callable[..., Any],
        is_by_rows: bool = False,
    ) -> None:
        """Adds gradients to those that their worker has, and updates if these are enough.

        `apply` makes the update of the mean gradients and the variables. Batches count by their
        rows with `is_by_rows`; otherwise all count alike.
        """
        units = self._units.setdefault(unwrapped(optimizer), {})
        # An optimizer may be given one part of its variables now and another then.
        key = tuple(id(v) for g, v in zip(gradients, variables) if g is not None)
        if key not in units:
            units[key] = _Unit(
                str(len(units)),
                policy,
                duplicate_rows.forms_of(gradients, variables),
                list(variables),
                is_by_rows,
                weakref.ref(optimizer),
            )
        accumulation = self._begin(optimizer, units[key])
        accumulation.on_gradients(_Batch(is_by_rows), gradients, variables, apply)

    def _begin(self, optimizer: keras.optimizers.Optimizer, unit: _Unit) -> Any:
        states = self._context().extended.worker_states
        state = WorkerVariables(states, f"{states.owner(unwrapped(optimizer))}/updates")
        context = Context(state, unit.name, unit.forms, unit.variables)
        accumulation = unit.policy.on_replica(context)
        state.begin()
        self._note(accumulation)
        return accumulation

    def _note(self, part: Any) -> None:
        """Notes a part of the function that is being traced which has a `count`."""
        trace = current_trace()
        if trace is not None:
            trace.kept.append(part)
        else:
            # The steps of a script's own loop are not seen here.
            self._are_steps_counted = False

    def _finisher(self, owner: keras.optimizers.Optimizer) -> tuple[int, Callable[[], None]]:
        """Number of accumulators to flush, and a worker function that flushes them."""
        units = [unit for unit in self._units.get(owner, {}).values() if unit.is_by_rows]
        owner_ref = weakref.ref(owner)

        def finish() -> None:
            for unit in units:
                by = unit.optimizer() or owner_ref()
                accumulation = self._begin(by, unit)
                accumulation.on_finish(None, lambda means, of, by=by: _apply(by, means, of))

        return len(units), finish

    def finish(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Has every worker send what it has, if there may be anything."""
        owner, context = unwrapped(optimizer), self._context()
        context.scheduler.join()
        count, finish = self._finisher(owner)
        is_finished = self._are_steps_counted and self._finished.get(owner) == self._steps
        if not count or is_finished:
            return
        known, functions = self._on_all_workers.get(owner, (0, None))
        if known != count:
            functions = StepFunctions(
                context,
                lambda nothing: finish(),
                lambda trace, results: (tf.zeros([0], tf.float64), (), ()),
                lambda: (),
            )
            self._on_all_workers[owner] = count, functions
        self._run_on_all_workers(context, functions)
        self._finished[owner] = self._steps

    def _run_on_all_workers(self, context: StepContext, functions: StepFunctions) -> None:
        """Has each worker that can be reached run a function, and waits."""
        function, payload = functions([()])

        def done(result: Any, run: Run) -> None:
            _, pending, _ = function.add_costs(result[0], context.totals)
            self.note_pending(pending, run.worker, steps=0)

        for worker in sorted(set(range(context.num_workers)) - context.scheduler.queue.lost):
            arguments = tf.constant(pack(function.variables)), payload
            closure = Closure(function.concrete, arguments, "finishing its updates", done)
            closure.after_loss = "what it was to finish is gone"
            context.scheduler.queue.put(closure, worker)
        context.scheduler.join()

    def training(self, variables: Sequence[keras.Variable]) -> list[keras.optimizers.Optimizer]:
        """The optimizers that train some of these Keras variables, so far as they are known."""
        wanted = {id(variable) for variable in variables}
        return [
            owner
            for owner, units in self._units.items()
            if any(not wanted.isdisjoint(key) for key in units)
        ]

    def note_pending(self, pending: int, worker: int, steps: int = 1) -> None:
        """Notes of how many batches a worker has something left after steps."""
        if pending != NOTHING_KEPT:
            self._steps += steps
            self._pending[worker] = pending

    @property
    def pending(self) -> dict[int, int]:
        """Of how many batches each worker has what it has not sent: a dict."""
        return {worker: count for worker, count in sorted(self._pending.items()) if count}

    def _note_loss(self, worker: int) -> None:
        count = self._pending.pop(worker, 0)
        if count:
            logger.warning(self._LOST, worker, count)


class _Batch:
    """Weight of a batch: its rows, or 1."""

    def __init__(self, is_by_rows: bool) -> None:
        self._rows = batch_rows() if is_by_rows else None

    def rows(self) -> tuple[Any, Any]:
        rows = 1 if self._rows is None else self._rows
        return rows, rows


def _apply(
    optimizer: keras.optimizers.Optimizer,
    means: Iterable[Gradient | None],
    variables: Sequence[keras.Variable],
) -> None:
    means = _times_scale(optimizer, means)
    with applying_flag.raised():
        optimizer.apply(means, variables)


def _times_scale(
    optimizer: keras.optimizers.Optimizer,
    gradients: Iterable[Gradient | None],
    is_inverse: bool = False,
) -> list[Gradient | None]:
    """Gradients times, or over, the loss scale of an optimizer that changes it."""
    scale = getattr(optimizer, "dynamic_scale", None)
    if scale is None:
        return list(gradients)
    factor = tf.convert_to_tensor(scale)
    factor = 1.0 / factor if is_inverse else factor
    return [map_values(lambda v: v * tf.cast(factor, v.dtype), one) for one in gradients]
