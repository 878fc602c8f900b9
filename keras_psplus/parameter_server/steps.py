"""Runs a model's steps on the workers and keeps the chief's totals of what they return."""

import threading
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_psplus.parameter_server.pulls import Pulls
from keras_psplus.parameter_server.worker_function import Trace, pack, unpack


class StepFunction(NamedTuple):
    """A worker function for batches of one form.

    Attributes:
        concrete: The concrete function, of the travelling variables' values and the batches.
        variables: The travelling variables, in order.
        notes: What `collect` noted while the function was traced.
        origin: The function that it is traced from; TensorFlow holds it weakly.
    """

    concrete: Any
    variables: list
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

    def __call__(self, payload):
        """The `StepFunction` for a payload, a list of batches or `joined` ones."""
        spec = tf.nest.map_structure(_with_any_batch_size, payload)
        key = repr(spec)
        if key not in self._functions:
            self._functions[key] = self._trace(spec)
        return self._functions[key]

    def _trace(self, spec):
        variables, stay, notes = [], set(), []

        def worker_function(initial, payload):
            with Trace(initial) as trace, Pulls(self._weights(), stay) as pulls:
                batches = _separate(payload)
                results = [self._strategy.run(self._step, args=(batch,)) for batch in batches]
                outputs, notes[:] = self._collect(trace, results)
            variables[:] = trace.variables
            written_in_loops.update(pulls.written_in_loops())
            return outputs

        while True:
            written_in_loops = set()
            function = tf.function(worker_function, autograph=False)
            with self._strategy.scope():
                concrete = function.get_concrete_function(tf.TensorSpec([None], tf.float64), spec)
            if written_in_loops <= stay:
                return StepFunction(concrete, variables, notes, function)
            stay |= written_in_loops


def joined(batches):
    """Batches in as few tensors as one has, to be sent in as few messages."""
    leaves = [leaf for batch in batches for leaf in tf.nest.flatten(batch)]
    if len(batches) == 1 or not all(isinstance(t, tf.Tensor) and t.shape.rank for t in leaves):
        return batches
    rows = [[len(leaf) for leaf in tf.nest.flatten(batch)] for batch in batches]
    whole = tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *batches)
    return {"whole": whole, "rows": tf.constant(np.transpose(rows), tf.int64)}


def _separate(payload):
    if not isinstance(payload, dict):
        return payload
    rows = payload["rows"]
    count = rows.shape[1]
    parts = [
        tf.split(leaf, rows[i], num=count)
        for i, leaf in enumerate(tf.nest.flatten(payload["whole"]))
    ]
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

    def submit(self, batches, ticket=None):
        """Sends one closure with a step for each batch; waits if enough are under way.

        Args:
            batches: List of batches.
            ticket: `worker_data.Ticket` that they are from, if the workers read them.
        """
        # What workers have read lies with them, as it is.
        payload = batches if ticket else joined(batches)
        function = self._functions(payload)
        variables = function.variables
        if self._variables is not None and variables is not self._variables:
            # A batch of another form; its function may meet the variables in another order.
            self.join()
            self._write_totals()
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
            _describe(batches, self._sent),
            ticket,
        )
        self._sent += count
        if self._logs is None:
            # The first step shows what the logs are called, and how often a step draws a seed.
            self._strategy.scheduler.wait_for(lambda: self._logs is not None)

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


def _describe(batches, first):
    last = first + len(batches) - 1
    numbers = f"batch {first}" if first == last else f"batches {first} to {last}"
    leaves = [leaf for leaf in tf.nest.flatten(batches[0]) if isinstance(leaf, tf.Tensor)]
    tensors = ", ".join(f"{leaf.dtype.name}{leaf.shape.as_list()}" for leaf in leaves)
    return f"{numbers} (counted from 0), of {tensors}"


def _with_any_batch_size(leaf):
    if isinstance(leaf, tf.Tensor) and leaf.shape.rank:
        return tf.TensorSpec([None] + leaf.shape.as_list()[1:], leaf.dtype)
    return tf.type_spec_from_value(leaf) if leaf is not None else None
