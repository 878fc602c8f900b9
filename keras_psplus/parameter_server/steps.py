"""Runs a model's steps on the workers and keeps the chief's totals of what they return."""

import threading
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_psplus.log import warn_once
from keras_psplus.parameter_server.pulls import Pulls
from keras_psplus.parameter_server.worker_function import Trace, pack, unpack


class StepFunction(NamedTuple):
    """A worker function for batches of one form.

    Attributes:
        concrete: The concrete function, of the travelling variables' values and the batches.
        variables: The travelling variables, in order.
        overwritten: Those of them that are given values instead of being added to.
        notes: What `collect` noted while the function was traced.
        origin: The function that it is traced from; TensorFlow holds it weakly.
    """

    concrete: Any
    variables: list
    overwritten: list
    notes: Any
    origin: Any


class StepFunctions:
    """Worker functions of one step function, one for each form of its batches.

    Args:
        strategy: `ParameterServerStrategy`.
        step: Function of one batch.
        collect: Function of the `Trace` and the list of what single steps return. Returns what the
            worker function returns, and notes about it.
        weights: Function that returns variables which steps may be expected to read.
    """

    def __init__(self, strategy, step, collect, weights):
        self._strategy, self._step, self._collect = strategy, step, collect
        self._weights = weights
        self._functions = {}

    def __call__(self, batches, element_spec=None, join=True):
        """The function for some batches.

        Args:
            batches: List of batches.
            element_spec: Type specification of the dataset's elements, if there is one.
            join: Whether the batches may be put together, to be sent in fewer messages.

        Returns:
            The `StepFunction`, and its argument besides the travelling values.
        """
        batch_spec = element_spec or tf.nest.map_structure(_with_any_batch_size, batches[0])
        payload, spec = batches, [batch_spec] * len(batches)
        if join and _can_be_joined(batches):
            payload, spec = _joined(batches, batch_spec)
        key = repr((batch_spec, spec))
        if key not in self._functions:
            self._functions[key] = self._trace(spec, batch_spec)
        return self._functions[key], payload

    def _trace(self, spec, batch_spec):
        variables, overwritten, stay, notes = [], [], set(), []

        def worker_function(initial, payload):
            with Trace(initial) as trace, Pulls(self._weights(), stay) as pulls:
                batches = _separate(payload, batch_spec)
                results = [self._strategy.run(self._step, args=(batch,)) for batch in batches]
                outputs, notes[:] = self._collect(trace, results)
            variables[:], overwritten[:] = trace.variables, trace.overwritten()
            written_in_loops.update(pulls.written_in_loops())
            return outputs

        while True:
            written_in_loops = set()
            function = tf.function(worker_function, autograph=False)
            with self._strategy.scope():
                concrete = function.get_concrete_function(tf.TensorSpec([None], tf.float64), spec)
            if written_in_loops <= stay:
                return StepFunction(concrete, variables, overwritten, notes, function)
            stay |= written_in_loops


def _can_be_joined(batches):
    if len(batches) == 1:
        return False
    forms = [[_row_form(leaf) for leaf in tf.nest.flatten(batch)] for batch in batches]
    return None not in forms[0] and all(form == forms[0] for form in forms)


def _row_form(leaf):
    is_dense = isinstance(leaf, tf.Tensor) and leaf.shape.rank
    return (leaf.dtype, leaf.shape[1:].as_list()) if is_dense else None


def _joined(batches, batch_spec):
    rows = np.transpose([[len(leaf) for leaf in tf.nest.flatten(batch)] for batch in batches])
    whole = tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *batches)
    spec = {
        "whole": tf.nest.map_structure(
            lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), batch_spec
        ),
        "rows": tf.TensorSpec(rows.shape, tf.int64),
    }
    return {"whole": whole, "rows": tf.constant(rows, tf.int64)}, spec


def _separate(payload, batch_spec):
    if not isinstance(payload, dict):
        return payload
    parts = []
    for i, (leaf, spec) in enumerate(
        zip(tf.nest.flatten(payload["whole"]), tf.nest.flatten(batch_spec))
    ):
        pieces = tf.split(leaf, payload["rows"][i], num=payload["rows"].shape[1])
        parts.append([tf.ensure_shape(piece, spec.shape) for piece in pieces])
    return [tf.nest.pack_sequence_as(payload["whole"], batch) for batch in zip(*parts)]


class StepRunner:
    """Sends train or test steps and keeps the totals of metrics and seeds.

    Args:
        strategy: `ParameterServerStrategy`.
        step: Function of one batch that returns a dict of scalar logs.
        weights: Function that returns variables which steps may be expected to read.
    """

    def __init__(self, strategy, step, weights):
        self._strategy = strategy
        self._functions = StepFunctions(strategy, step, _changes_and_logs, weights)
        self._lock = threading.Lock()
        self._sent = 0
        self._clear()

    def _clear(self):
        self._variables, self._totals = None, None
        self._steps, self._draws = 0, None
        self._logs = None

    def submit(self, batches, element_spec=None, ticket=None):
        """Sends one closure with a step for each batch; waits if enough are under way.

        Args:
            batches: List of batches.
            element_spec: Type specification of the dataset's elements, if there is one.
            ticket: `worker_data.Ticket` that they are from, if the workers read them.
        """
        # What workers have read lies with them, as it is.
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
            initial = self._totals + self._seeds_after(self._steps)
            self._steps += len(batches)
        count = len(batches)
        self._strategy.scheduler.submit(
            function.concrete,
            (tf.constant(initial), payload),
            lambda result: self._add(count, result.numpy(), function.notes),
            describe(batches, self._sent),
            ticket,
        )
        self._sent += count
        if self._logs is None:
            # The first step shows what the logs are called, and how often a step draws a seed.
            self._strategy.scheduler.wait_for(lambda: self._logs is not None)

    def _wait_for_earlier_steps(self, overwritten):
        """Steps of which each needs what the last one left cannot be under way together."""
        names = ", ".join(sorted({variable.name.split(":")[0] for variable in overwritten}))
        if self._strategy.num_workers > 1:
            warn_once(
                "metric state that a step replaces instead of adding to it (%s) makes every step "
                "wait for the one before: one worker at a time. Write such metrics as sums, or "
                "leave them out of compile().",
                names,
            )
        if self._strategy.scheduler.is_busy:
            self._strategy.scheduler.join()

    @property
    def logs(self):
        """The logs of the step that came back last, of totals over all workers."""
        with self._lock:
            return dict(self._logs or {})

    @property
    def is_open(self):
        """Whether steps have been sent since the last `close`."""
        return self._totals is not None

    @property
    def variables(self):
        """The travelling variables that the steps use."""
        return list(self._variables or [])

    def join(self):
        """Waits for all steps; on a worker's error, gives up the totals and raises it."""
        try:
            self._strategy.scheduler.join()
        except Exception:
            self._clear()
            self._sent = 0
            raise

    def close(self):
        """Writes the totals to the chief's variables, once all steps are back."""
        self._write_totals()
        self._sent = 0

    def _write_totals(self):
        with self._lock:
            if self._totals is not None:
                unpack(self._variables, self._totals + self._seeds_after(self._steps))
        self._clear()

    def _add(self, count, result, names):
        with self._lock:
            if self._totals is None:
                return
            changes, logs = np.split(result, [len(result) - len(names)])
            is_seed = self._is_seed()
            if self._draws is None:
                self._draws = np.where(is_seed, changes / count, 0.0)
            self._totals = self._totals + np.where(is_seed, 0.0, changes)
            self._logs = {name: value.astype(dtype) for (name, dtype), value in zip(names, logs)}

    def _is_seed(self):
        flags = [np.full(v.shape.num_elements(), v.is_seed) for v in self._variables]
        return np.concatenate([np.zeros(0, bool), *flags])

    def _seeds_after(self, steps):
        """How far seeds have moved after some steps, so that no two steps draw the same."""
        return 0.0 if self._draws is None else self._draws * steps


def _changes_and_logs(trace, results):
    """What a step brings back, in one tensor: each would cost a message of its own."""
    logs = _scalars(results[-1])
    notes = [(name, value.dtype.as_numpy_dtype) for name, value in logs.items()]
    values = [tf.cast(tf.reshape(value, [1]), tf.float64) for value in logs.values()]
    return tf.concat([trace.changes(), *values], 0), notes


def _scalars(logs):
    flat = {}
    for name, value in (logs or {}).items():
        if isinstance(value, dict):
            flat.update(_scalars(value))
        else:
            value = tf.convert_to_tensor(value)
            flat[name] = tf.reduce_mean(value) if value.shape.rank != 0 else value
    return flat


def are_same(variables, others):
    """Whether two lists hold the same objects in the same order."""
    return len(variables) == len(others) and all(a is b for a, b in zip(variables, others))


def describe(batches, first):
    """Number and form of batches, for messages."""
    last = first + len(batches) - 1
    numbers = f"batch {first}" if first == last else f"batches {first} to {last}"
    leaves = [leaf for leaf in tf.nest.flatten(batches[0]) if isinstance(leaf, tf.Tensor)]
    tensors = ", ".join(f"{leaf.dtype.name}{leaf.shape.as_list()}" for leaf in leaves)
    return f"{numbers} (counted from 0), of {tensors}"


def _with_any_batch_size(leaf):
    if isinstance(leaf, tf.Tensor) and leaf.shape.rank:
        return tf.TensorSpec([None] + leaf.shape.as_list()[1:], leaf.dtype)
    return tf.type_spec_from_value(leaf) if leaf is not None else None
