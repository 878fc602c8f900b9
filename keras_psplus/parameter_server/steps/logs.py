"""Logs of workers' steps: a step's result vector, and the chief's totals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.graph import metrics as metric_logs
from keras_psplus.parameter_server.tracing.remote import CHIEF
from keras_psplus.parameter_server.tracing.worker_function import (
    ClosureVariable,
    Trace,
    current_trace,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from keras_psplus.parameter_server.steps.step_functions import TracedStep


# Totals of the closure variables, to which steps add what they return.


# Odd, so that no two shares of any step share a seed (mod 2 ** 31).
_SEED_STRIDE = 0x3C6EF35F


class ClosureTotals:
    """Values of closure variables, kept by the chief while steps are under way.

    Attributes:
        values: A float64 vector, with the seeds of the beginning.
        draws: Advance of the seeds in one step; None until a step has shown it.
    """

    def __init__(
        self, variables: Sequence[ClosureVariable], draws: np.ndarray | None = None
    ) -> None:
        self.variables, self.values, self.draws = list(variables), pack(variables), draws
        self.steps = 0
        self._is_seed = self._flags(lambda variable: variable.is_seed)
        self._is_integer = self._flags(lambda variable: variable.dtype.is_integer)

    def _flags(self, of_variable: Callable[[ClosureVariable], bool]) -> np.ndarray:
        flags = [np.full(v.shape.num_elements(), of_variable(v)) for v in self.variables]
        return np.concatenate([np.zeros(0, bool), *flags])

    @property
    def has_seeds(self) -> bool:
        return bool(self._is_seed.any())

    @property
    def next(self) -> np.ndarray:
        """Values for the next step: no two steps draw the same."""
        return self.values if self.draws is None else self.values + self.draws * self.steps

    def next_for(self, share: int) -> np.ndarray:
        """Values for a worker's share of the next step: each share draws from other seeds."""
        values, first = self.next.copy(), 0
        for variable in self.variables:
            if variable.is_seed:
                values[first] = (values[first] + share * _SEED_STRIDE) % (1 << 31)
            first += variable.shape.num_elements()
        return values

    def note_draws(self, changes: np.ndarray, steps: int) -> None:
        """Notes how far steps have moved the seeds, if it is not known yet."""
        if self.draws is None:
            self.draws = np.where(self._is_seed, changes / steps, 0.0)

    def add(
        self,
        changes: np.ndarray,
        parts: np.ndarray,
        steps: int,
        overwritten: Sequence[ClosureVariable],
    ) -> np.ndarray:
        """Adds what steps have changed; returns sums for metrics, means for others.

        Args:
            changes: The changes in each share of a step, a matrix.
            parts: Each share's part of the rows.
            overwritten: Variables that a step replaces instead of adding to them.
        """
        self.note_draws(changes[0], steps)
        change = changes[0]
        if len(parts) > 1:
            replaced = {id(variable) for variable in overwritten}
            is_sum = self._flags(lambda v: v.kind == "total" and id(v) not in replaced)
            means = parts @ changes
            means = np.where(self._is_integer, np.rint(means), means)
            change = np.where(is_sum, changes.sum(0), means)
        change = np.where(self._is_seed, 0.0, change)
        self.values = self.values + change
        return change

    def write(self) -> None:
        """Writes them to the chief's variables, seeds after all steps that have been sent."""
        unpack(self.variables, self.next)


def are_same(variables: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two lists hold the same objects in the same order."""
    return len(variables) == len(others) and all(a is b for a, b in zip(variables, others))


# Logs of workers' steps: a step's result vector, and the chief's computation from it.


class LogForm(NamedTuple):
    name: str
    dtype: Any
    shape: tuple[int, ...]


class LogNotes(NamedTuple):
    """Layout of the logs in a step's result vector.

    Attributes:
        computed: `metric_logs.MetricLogs`: the logs that the chief computes once more.
        states: Numbers of the closure variables that are the states of metrics.
        size: How many numbers of the vector are logs, and what these are computed from.
    """

    forms: list[LogForm]
    computed: metric_logs.MetricLogs
    states: list[int]
    size: int

    def split(self, vector: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Splits vectors, along the last axis, into changes, logs, and inputs of logs."""
        first = vector.shape[-1] - self.size
        numbers = sum(math.prod(form.shape) for form in self.forms)
        changes, logs, inputs = np.split(vector, [first, first + numbers], -1)
        return changes, logs, inputs

    def logs(self, vector: np.ndarray) -> dict[str, Any]:
        """Logs of a vector of their numbers, in the shapes that Keras gives them."""
        ends = np.cumsum([math.prod(form.shape) for form in self.forms], dtype=int)
        # `[()]` makes an array without axes a number.
        return {
            form.name: part.reshape(form.shape).astype(form.dtype)[()]
            for form, part in zip(self.forms, np.split(vector, ends[:-1]))
        }


def changes_and_logs(
    trace: Trace,
    results: Sequence[dict[str, Any]],
    metrics: Callable[[Any], Mapping[str, Any]] | None = None,
) -> tuple[tf.Tensor, tuple[()], LogNotes]:
    """Concatenates a step's changes and logs to one tensor.

    Each would cost a separate message.

    Args:
        metrics: Function of closure variables that returns a flat dict of results of metrics, of a
            step that several workers take together; else None.

    Raises:
        ValueError: If a log of several workers is computed from a metric in a way that the chief
            cannot repeat.
    """
    logs = _tensors(results[-1])
    states = [i for i, variable in enumerate(trace.variables) if variable.kind == "total"]
    handles = [trace.handle_of(trace.variables[i]) for i in states]
    graph = tf.compat.v1.get_default_graph()
    here = {n: value for n, value in logs.items() if getattr(value, "graph", None) is graph}
    # The first write of a state is that of its value before the step.
    computed = metric_logs.MetricLogs(here, handles, 1, _can_read, can_average=False)
    if metrics is not None and computed.refused:
        # An object that is called as a metric is, is taken for its result.
        named = metrics(list(trace.variables))
        metric_logs.refuse({n: why for n, why in computed.refused.items() if n not in named})
    forms = [LogForm(n, one.dtype.as_numpy_dtype, tuple(one.shape)) for n, one in logs.items()]
    values = [*logs.values(), *computed.inputs]
    parts = [tf.cast(tf.reshape(value, [-1]), tf.float64) for value in values]
    size = sum(value.shape.num_elements() for value in values)
    notes = LogNotes(forms, computed, states, size)
    return tf.concat([trace.changes(), *parts], 0), (), notes


def results_of(model: keras.Model, variables: Iterable[ClosureVariable]) -> dict[str, Any]:
    """The results of metrics that have one of some variables, by names as in logs."""
    return _flat(
        {
            metric.name: metric.result()
            for metric in model.metrics
            if any(v._value is used for v in metric.variables for used in variables)
        }
    )


def _flat(results: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in results.items():
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat


def _can_read(read: metric_logs.Read) -> bool:
    return read.is_first or read.is_last


def _tensors(logs: Mapping[str, Any] | None) -> dict[str, tf.Tensor]:
    values = {name: tf.convert_to_tensor(value) for name, value in _flat(logs or {}).items()}
    # Of one number for each row, another worker has another number of them.
    return {n: v if v.shape.is_fully_defined() else tf.reduce_mean(v) for n, v in values.items()}


class ComputedLogs:
    """Computes logs once more, on the chief, from the totals of metrics.

    Args:
        function: `TracedStep` whose notes are `LogNotes`.
        results: Function of closure variables that returns a flat dict of results of metrics.
    """

    def __init__(self, function: TracedStep, results: Callable[[Any], Mapping[str, Any]]) -> None:
        self._function, self._results = function, results
        self._names: list[str] = []
        origin = tf.function(self._compute, autograph=False)
        specs = [tf.TensorSpec([None], tf.float64)] * 3
        with tf.device(CHIEF):
            # TensorFlow holds what it was traced from weakly.
            self._concrete, self._origin = origin.get_concrete_function(*specs), origin

    def __call__(
        self, totals: np.ndarray, before: np.ndarray, inputs: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The logs.

        Args:
            totals: Values of the closure variables after the step.
            before: Those before it.
            inputs: What the logs are computed from besides, averaged over workers.
        """
        with tf.device(CHIEF):
            found = self._concrete(*(tf.constant(one) for one in (totals, before, inputs)))
        return {name: value.numpy() for name, value in zip(self._names, found)}

    def _compute(self, totals: tf.Tensor, before: tf.Tensor, inputs: tf.Tensor) -> list[tf.Tensor]:
        function, notes = self._function, self._function.notes
        computed = notes.computed
        with current_trace.being(Trace(totals)) as trace:
            handles = [trace.handle_of(variable) for variable in function.variables]
            reads = [
                _value_of(function.variables, notes.states[read.state], before if early else totals)
                for read in computed.reads
                for early in [read.is_first and not read.is_last]
            ]
            of_states = [handles[i] for i in notes.states]
            found = computed.rebuild(reads, _parts(inputs, computed.inputs), of_states)
            if computed.refused:
                by_name = self._results(function.variables)
                found |= {n: value for n, value in by_name.items() if n in computed.refused}
        self._names[:] = found
        return [tf.convert_to_tensor(value) for value in found.values()]


def _value_of(variables: Sequence[ClosureVariable], number: int, vector: tf.Tensor) -> tf.Tensor:
    """The value of a closure variable in a vector of all of them."""
    sizes = [variable.shape.num_elements() for variable in variables]
    first, variable = sum(sizes[:number]), variables[number]
    value = tf.reshape(vector[first : first + sizes[number]], variable.shape)
    return tf.cast(value, variable.dtype)


def _parts(vector: tf.Tensor, likes: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    parts = tf.split(vector, [like.shape.num_elements() for like in likes]) if likes else []
    return [tf.cast(tf.reshape(p, like.shape), like.dtype) for p, like in zip(parts, likes)]
