"""The logs of a replica's step, as those of the global batch.

Logs that are computed from metrics are computed once more from the states of all replicas
(`core/graph/metrics.py`); floats of the replica's own are averaged, weighted by rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.core.graph import metrics as metric_logs
from keras_psplus.keras_internals.keras_parts import Variable
from keras_psplus.tf_internals.composite_variable import own_copy

if TYPE_CHECKING:
    import keras

    from keras_psplus.all_reduce.step.replica_step import MirroredReplicaStep
    from keras_psplus.core.graph.metrics import Read


def synchronise(
    step: MirroredReplicaStep,
    logs: Any,
    metrics: Sequence[keras.metrics.Metric],
    means: Sequence[tf.Variable],
) -> Any:
    """Makes what a replica has changed, and its logs, global.

    Args:
        means: Variables to set to their mean over all replicas, weighted by rows.

    Returns:
        Structure like `logs`.

    Raises:
        ValueError: If a log is computed from a metric in a way that cannot be repeated.
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
