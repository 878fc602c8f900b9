"""Functions of a step on all replicas, and their logs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_psplus.all_reduce.data import sharding
from keras_psplus.all_reduce.step.replica_step import MirroredReplicaStep
from keras_psplus.core.batch import batches
from keras_psplus.core.batch.batches import LastRow
from keras_psplus.core.graph import metrics as metric_logs
from keras_psplus.core.graph.compiled_calls import CompiledCalls, without_compilation
from keras_psplus.engine import Call
from keras_psplus.keras_internals.keras_parts import Variable, tree
from keras_psplus.tf_internals.composite_variable import own_copy

if TYPE_CHECKING:
    from keras_psplus.cluster.monitor.progress import Progress
    from keras_psplus.core.graph.metrics import Read


# The logs of a replica's step, as those of the global batch.
#
# Logs that are computed from metrics are computed once more from the states of all replicas
# (`core/graph/metrics.py`); floats of the replica's own are averaged, weighted by rows.


def synchronise(
    step: MirroredReplicaStep,
    logs: Any,
    metrics: Sequence[keras.metrics.Metric],
    means: Sequence[tf.Variable],
) -> Any:
    """Makes what a replica has changed, and its logs, global.

    Args:
        means: Variables to set to their mean over all replicas, weighted by rows.
    """
    paths, leaves = _flatten(logs)
    if tf.executing_eagerly():
        # Metrics have returned results of all replicas in the step.
        return _synchronise_eagerly(step, logs, metrics, means, paths, leaves)
    graph, states = tf.compat.v1.get_default_graph(), step.totals
    tensors = {
        path: leaf
        for path, leaf in zip(paths, leaves)
        if hasattr(leaf, "op") and leaf.graph is graph
    }
    computed = metric_logs.MetricLogs(
        tensors, [graph.capture(own_copy(state).handle) for state in states]
    )
    if computed.refused:
        # An object that is called as a metric is, is taken for its result.
        results = _results(metrics)
        metric_logs.refuse({p: why for p, why in computed.refused.items() if p not in results})
    own = [
        path
        for path, leaf in zip(paths, leaves)
        if path not in computed.names and path not in computed.refused and _is_averaged(leaf)
    ]
    between = [read for read in computed.reads if not read.is_first and not read.is_last]
    found = step.synchronise(
        means,
        [*(leaves[paths.index(path)] for path in own), *computed.inputs],
        [(states[read.state], read.tensor) for read in between],
    )
    new = dict(zip(own, found))
    inputs, rest = found[len(own) :], found[len(own) + len(computed.inputs) :]
    summed = {read.tensor.ref(): total for read, total in zip(between, rest)}
    reads = [_read_again(read, states, summed) for read in computed.reads]
    again = computed.rebuild(reads, inputs)
    new |= _averaged(step, again) if computed.depends_on_rows else again
    if computed.refused:
        new |= {p: value for p, value in _results(metrics).items() if p in computed.refused}
    return tf.nest.pack_sequence_as(logs, [new.get(p, leaf) for p, leaf in zip(paths, leaves)])


def _read_again(read: Read, states: list[tf.Variable], summed: dict[Any, tf.Tensor]) -> tf.Tensor:
    if read.is_first:
        return read.tensor
    if read.is_last:
        return own_copy(states[read.state]).read_value()
    return summed[read.tensor.ref()]


def _averaged(step: MirroredReplicaStep, logs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    names = [name for name, value in logs.items() if _is_averaged(value)]
    return logs | dict(zip(names, step.average(logs[name] for name in names)))


def _synchronise_eagerly(
    step: MirroredReplicaStep,
    logs: Any,
    metrics: Sequence[keras.metrics.Metric],
    means: Sequence[tf.Variable],
    paths: list[str],
    leaves: list[Any],
) -> Any:
    # A tf.function inside does not know of the other replicas.
    inside = [metric for metric in metrics if id(metric) not in step.asked_metrics]
    names = _results(inside)
    own = [i for i, leaf in enumerate(leaves) if _is_averaged(leaf) and paths[i] not in names]
    for i, value in zip(own, step.synchronise(means, [leaves[i] for i in own])):
        leaves[i] = value
    new = _results(inside)
    leaves = [new.get(path, leaf) for path, leaf in zip(paths, leaves)]
    return tf.nest.pack_sequence_as(logs, leaves)


def _flatten(logs: Any) -> tuple[list[str], list[Any]]:
    pairs = tf.nest.flatten(logs)
    paths = [path for path, _ in _with_paths(logs)]
    leaves = [tf.convert_to_tensor(leaf) if isinstance(leaf, Variable) else leaf for leaf in pairs]
    return paths, leaves


def _with_paths(logs: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Pairs of a leaf's path and the leaf, in the order of `tf.nest.flatten`."""
    if not tf.nest.is_nested(logs):
        yield "/".join(path), logs
    elif isinstance(logs, dict):
        for key in sorted(logs):
            yield from _with_paths(logs[key], (*path, str(key)))
    else:
        for i, leaf in enumerate(tf.nest.flatten(logs)):
            yield "/".join((*path, str(i))), leaf


def _is_averaged(leaf: Any) -> bool:
    return tf.is_tensor(leaf) and leaf.dtype.is_floating and leaf.shape.is_fully_defined()


def _results(metrics: Iterable[keras.metrics.Metric]) -> dict[str, Any]:
    """The results of metrics by the names that they have in logs."""
    found: dict[str, Any] = {}
    for metric in metrics:
        result = metric.result()
        found |= result if isinstance(result, dict) else {metric.name: result}
        if isinstance(result, dict):
            found |= {f"{metric.name}/{name}": value for name, value in result.items()}
    return found


# Train, test and predict functions that run on each replica, and their results.

# Steps that `fit` and `evaluate` take one by one, with less of Python around each.
#
# Keras puts the results of a step into an optional, to be asked whether there are any and to be
# taken out of it, which are two calls of TensorFlow more; and a `tf.function` looks at what it is
# called with, to find out which of its graphs is meant. Both together took 1 ms of a step of 15, in
# which no worker computed.


def single_steps_of(
    function: Callable[[Any], Any], steps_per_execution: int
) -> Callable[[Any], Any]:
    """Wraps a function so that each call runs one step on an iterator.

    Args:
        function: Keras's function of an iterator, or of a list of batches.

    Returns:
        Function of a `tf.data.Iterator` or a `tf.distribute.DistributedIterator` that returns the
        results of the last step, and raises `tf.errors.OutOfRangeError` or `StopIteration` at the
        end of the data.
    """
    return function if steps_per_execution != 1 else _SingleSteps(function)


def after_data(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A step nothing of which runs before its batch is there.

    Where data end, the rest of a step would run beside what finds that out, and the optimizer would
    have counted a step.
    """

    @functools.wraps(step)
    def step_after_data(batch: Any) -> Any:
        tensors = [t for t in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(t)]
        with tf.control_dependencies(tensors):
            return step(batch)

    return step_after_data


class _SingleSteps:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        @tf.autograph.experimental.do_not_convert
        def step(iterator: Any) -> Any:
            return function([iterator.get_next()])

        self._step = tf.function(step, reduce_retracing=True)
        self._graph: Any = None
        self._iterator: Callable[[], Any] = lambda: None

    def __call__(self, iterator: Any) -> Any:
        if tf.config.functions_run_eagerly():
            return self._step(iterator)
        if self._iterator() is not iterator:
            results = self._step(iterator)
            # Not kept alive by this: it may hold much of the data.
            self._iterator = weakref.ref(iterator)
            self._graph = self._step.get_concrete_function(iterator)
            return results
        # There is no public way to call a graph without its arguments being looked at.
        inputs = tf.nest.flatten(iterator, expand_composites=True)
        return self._graph._call_flat(inputs, self._graph.captured_inputs)


_ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator)


def make_function(
    progress: Progress, world: batches.World, call: Call, compiled: CompiledCalls | None
) -> Callable[[Any], Any]:
    """A train or test function that takes steps on all replicas.

    Args:
        compiled: What compiles the calls of models in it; None if XLA is not to be used.
    """
    model, step_function = call.owner, call.get("step_function")
    step = after_data(_replica_step(model, step_function, compiled))
    with without_compilation(model):
        function = call.proceed(step_function=step)
    of_iterator = function
    if not model.run_eagerly:
        of_iterator = single_steps_of(function, model.steps_per_execution)

    def function_of_iterator(iterator: Any) -> Any:
        if isinstance(iterator, _ITERATORS):
            return of_iterator(iterator)
        return function(sharding.split_eagerly(world, batch) for batch in iterator)

    return in_progress(progress, call, function_of_iterator)


def in_progress(
    progress: Progress, call: Call, function: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """A train or test function that notes its steps."""
    model = call.owner
    is_training = call.get("step_function") == model.train_step
    doing = "training step" if is_training else "evaluation step"

    def function_in_progress(iterator: Any) -> Any:
        progress.begin(doing)
        try:
            with progress.timing(model.steps_per_execution):
                result = function(iterator)
        finally:
            progress.end()
        if is_training:
            progress.count(model.steps_per_execution)
        return result

    return function_in_progress


def make_predict_function(
    progress: Progress, world: batches.World, call: Call, compiled: CompiledCalls | None
) -> None:
    """Sets `model.predict_function`, which takes the distributed batches of some steps."""
    model = call.owner
    view = _WithPredictStep(model, _predict_step(model, compiled))
    with without_compilation(model):
        call.original(view, *call.args, **call.kwargs)
    function = view.predict_function
    if function is model.predict_function:
        return

    def function_of_batches(all_data: Sequence[Any]) -> Any:
        all_data = [b if _is_distributed(b) else sharding.split_eagerly(world, b) for b in all_data]
        progress.begin("prediction step")
        try:
            return function(all_data)
        finally:
            progress.end()

    model.predict_function = function_of_batches


def reduce_outputs(call: Call) -> Any:
    """One value of what the replicas' steps have returned: Keras's `reduce_per_replica`."""
    values, strategy = call.owner, call.get("strategy")
    if call.get("reduction") == "auto":
        # The replica step has made them equal on all replicas.
        return tree.map_structure(lambda v: strategy.experimental_local_results(v)[0], values)
    gather = strategy.extended.gather_rows
    if tf.executing_eagerly():
        gather = tf.function(gather, autograph=False)
    return tree.map_structure(gather, values)


class _WithPredictStep:
    """A model with another `predict_step`, as `make_predict_function` sees it."""

    def __init__(self, model: keras.Model, predict_step: Callable[[Any], Any]) -> None:
        self._model, self.predict_step = model, predict_step
        self.predict_function = model.predict_function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _predict_step(model: keras.Model, compiled: CompiledCalls | None) -> Callable[[Any], Any]:
    """A predict step whose outputs are those of the replica's own rows."""
    last_row = LastRow()

    def predict_step(batch: Any) -> Any:
        step = MirroredReplicaStep.current()
        assert step is not None
        step.compiled_calls = compiled
        if not step.has_batch_fraction:
            batch = _padded(step, last_row, batch, step.set_rows)
        outputs = model.predict_step(batch)
        return tree.map_structure(
            lambda t: step.rows_if_any(t) if tf.is_tensor(t) and t.shape.rank else t, outputs
        )

    return predict_step


def _padded(
    step: MirroredReplicaStep, last_row: LastRow, batch: Any, note: Callable[[Any], None]
) -> Any:
    """Pads a replica's batch to at least one row, after noting its number of rows."""
    rows = batches.rows_of(batch)
    if rows is None:
        return batch
    note(rows)
    padded = last_row.padded(batch, rows, step.rank)
    step.sums.on_padded_batch(batch, padded)
    return padded


def _is_distributed(batch: Any) -> bool:
    return isinstance(batch, (batches.Shards, batches.Batch)) or any(
        isinstance(leaf, tf.distribute.DistributedValues) for leaf in tree.flatten(batch)
    )


def _replica_step(
    model: keras.Model, step_function: Callable[[Any], Any], compiled: CompiledCalls | None
) -> Callable[[Any], Any]:
    """A train or test step that leaves metrics, moving averages and logs equal everywhere."""
    # Kept over traces: a step that is itself a tf.function is traced once only.
    changed, touched, last_row = {}, set(), LastRow()

    def replica_step(batch: Any) -> Any:
        step = MirroredReplicaStep.current()
        assert step is not None
        if not step.has_batch_fraction:
            batch = _padded(step, last_row, batch, step.agree_on_batch_fraction)
        states = [v._value for v in model.metrics_variables]
        step.note_baselines(states)
        step.compiled_calls = compiled
        logs = step_function(batch)
        if compiled is not None:
            compiled.check()
        changed.update({v.ref(): v for v in step.changed})
        touched.update(step.touched)
        metrics = [m for m in model.metrics if any(v._value.ref() in touched for v in m.variables)]
        return synchronise(step, logs, metrics, list(changed.values()))

    return replica_step
