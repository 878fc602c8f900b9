"""Gradients that stay on their worker for some batches, and what the chief knows of them.

Each worker sums the gradients of the batches that it happens to be given, and updates when they are
enough for it, whatever the others have.
"""

import contextlib
import threading
import weakref
from typing import Any, NamedTuple

import tensorflow as tf

from keras_psplus.log import logger
from keras_psplus.parameter_server import worker_function
from keras_psplus.parameter_server.everywhere import Everywhere
from keras_psplus.parameter_server.worker_variables import WorkerVariables
from keras_psplus.updates.accumulation import Accumulation, forms_of

_NOTHING = -1
_local = threading.local()


def is_applying():
    """Whether an optimizer of this thread is given sums, not a batch's gradients."""
    return getattr(_local, "applying", False)


@contextlib.contextmanager
def batch_of(rows):
    """Context of tracing the step on a batch.

    Args:
        rows: Number of its rows, an int or a scalar; None if it has none.
    """
    outer, _local.rows = getattr(_local, "rows", None), rows
    try:
        yield
    finally:
        _local.rows = outer


class _Unit(NamedTuple):
    """Variables whose gradients are summed together.

    Attributes:
        name: What tells them from others of the same optimizer.
        steps: Batches for each update.
        forms: The `Form`s of their gradients.
        variables: Keras's variables; without them, other ones might come to have their ids.
        is_by_rows: Whether batches count by their rows, and a flush updates.
        optimizer: Weak reference to the optimizer that applies them.
    """

    name: str
    steps: int
    forms: list
    variables: list
    is_by_rows: bool
    optimizer: Any


class Updating:
    """What a strategy's `updates` stands for, and Keras's own `gradient_accumulation_steps`.

    Args:
        strategy: `ParameterServerStrategy`.
        policy: `keras_psplus.updates.Updates` or None.
    """

    _LOST = (
        "worker-%d was lost with the gradients of %d batch(es) that it had summed and not sent "
        "yet; they are missing from training"
    )

    def __init__(self, strategy, policy):
        self.policy = policy
        self._strategy = weakref.ref(strategy)
        self._units = weakref.WeakKeyDictionary()
        self._in_trace = weakref.WeakKeyDictionary()
        self._everywhere = weakref.WeakKeyDictionary()
        self._finished = weakref.WeakKeyDictionary()
        self._held, self._steps, self._are_steps_counted = {}, 0, True
        strategy.scheduler.on_worker_lost = self._note_loss

    def take(self, optimizer, gradients, variables):
        """Takes the gradients of a batch, in the function of a worker.

        Args:
            optimizer: The Keras optimizer that they are given to.
            gradients: List of tensors, `tf.IndexedSlices` or None.
            variables: Their Keras variables.
        """
        # Another worker's update may change the scale between this worker's batches.
        gradients = [_over(g, _scale_of(optimizer)) for g in gradients]
        self.accumulate(
            optimizer,
            self.policy.steps,
            gradients,
            variables,
            lambda means, of: _apply(optimizer, means, of),
            is_by_rows=True,
        )

    def accumulate(self, optimizer, steps, gradients, variables, apply, is_by_rows=False):
        """Adds gradients to those that their worker has, and updates if these are enough.

        Args:
            optimizer: The Keras optimizer that they are given to.
            steps: Batches for each update.
            gradients: List of tensors, `tf.IndexedSlices` or None.
            variables: Their Keras variables.
            apply: Function of the mean gradients and the variables that makes the update.
            is_by_rows: Whether batches count by their rows; otherwise all count alike.
        """
        units = self._units.setdefault(_owner(optimizer), {})
        # An optimizer may be given one part of its variables now and another then.
        key = tuple(id(v) for g, v in zip(gradients, variables) if g is not None)
        if key not in units:
            units[key] = _Unit(
                str(len(units)),
                steps,
                forms_of(gradients),
                list(variables),
                is_by_rows,
                weakref.ref(optimizer),
            )
        accumulation = self._begin(optimizer, units[key])
        accumulation(_Batch(is_by_rows), gradients, variables, apply)

    def _begin(self, optimizer, unit):
        states = self._strategy().extended.worker_states
        kept = WorkerVariables(states, f"{states.owner(_owner(optimizer))}/updates")
        accumulation = Accumulation(unit.steps, kept, unit.name, unit.forms, unit.variables)
        kept.begin()
        self._note(accumulation)
        return accumulation

    def _note(self, part):
        """Notes a part of the function that is being traced which has a `count`."""
        trace = worker_function.current()
        if trace is not None:
            self._in_trace.setdefault(trace, []).append(part)
        else:
            # The steps of a script's own loop are not seen here.
            self._are_steps_counted = False

    def _finisher(self, owner):
        """How many parts there are to finish, and a function of a worker that finishes them."""
        units = [unit for unit in self._units.get(owner, {}).values() if unit.is_by_rows]
        kept = weakref.ref(owner)

        def finish():
            for unit in units:
                by = unit.optimizer() or kept()
                accumulation = self._begin(by, unit)
                accumulation.finish(None, lambda means, of, by=by: _apply(by, means, of))

        return len(units), finish

    def finish(self, optimizer):
        """Has every worker send what it has, if there may be anything.

        Args:
            optimizer: The Keras optimizer.
        """
        owner, strategy = _owner(optimizer), self._strategy()
        strategy.scheduler.join()
        count, finish = self._finisher(owner)
        is_finished = self._are_steps_counted and self._finished.get(owner) == self._steps
        if not count or is_finished:
            return
        known, everywhere = self._everywhere.get(owner, (0, None))
        if known != count:
            everywhere = Everywhere(strategy, finish, self._held_in)
            self._everywhere[owner] = count, everywhere
        everywhere(self._note_held)
        self._finished[owner] = self._steps

    def training(self, variables):
        """The optimizers that train some of these Keras variables, so far as they are known."""
        wanted = {id(variable) for variable in variables}
        return [
            owner
            for owner, units in self._units.items()
            if any(not wanted.isdisjoint(key) for key in units)
        ]

    def _held_in(self, trace):
        """Of how many batches the worker that runs a function has something left, a vector."""
        counts = [one.count for one in self._in_trace.get(trace, ())]
        held = tf.reduce_max(tf.stack(counts)) if counts else _NOTHING
        return tf.cast(tf.reshape(held, [1]), tf.float64)

    def with_held(self, collect):
        """A `collect`, as for `StepFunctions`, whose vector ends with what `take_held` takes."""

        def collect_with_held(trace, results):
            vector, outputs, notes = collect(trace, results)
            return tf.concat([vector, self._held_in(trace)], 0), outputs, notes

        return collect_with_held

    def take_held(self, vector, worker):
        """Notes what a step has left on a worker, and returns the rest of the vector."""
        if vector[-1] != _NOTHING:
            self._steps += 1
        self._note_held(vector[-1:], worker)
        return vector[:-1]

    def _note_held(self, vector, worker):
        if vector[0] != _NOTHING:
            self._held[worker] = int(vector[0])

    @property
    def held(self):
        """Of how many batches each worker has what it has not sent: a dict."""
        return {worker: count for worker, count in sorted(self._held.items()) if count}

    def _note_loss(self, worker):
        count = self._held.pop(worker, 0)
        if count:
            logger.warning(self._LOST, worker, count)


class _Batch:
    """What a batch counts by."""

    def __init__(self, is_by_rows):
        self._rows = getattr(_local, "rows", None) if is_by_rows else None

    def rows(self):
        rows = 1 if self._rows is None else self._rows
        return rows, rows


def _apply(optimizer, means, variables):
    scale = _scale_of(optimizer)
    outer, _local.applying = is_applying(), True
    try:
        optimizer.apply([_times(mean, scale) for mean in means], variables)
    finally:
        _local.applying = outer


def _owner(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer)


def _scale_of(optimizer):
    """The factor in the gradients that an optimizer is given, if it changes; else None."""
    scale = getattr(optimizer, "dynamic_scale", None)
    return None if scale is None else tf.convert_to_tensor(scale)


def _over(gradient, scale):
    return _times(gradient, None if scale is None else 1.0 / scale)


def _times(gradient, factor):
    if gradient is None or factor is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)
