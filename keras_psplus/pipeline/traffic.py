"""Counts what training steps send from stage to stage, and from pipeline to pipeline.

TensorFlow's runtime sends tensors by itself, so they are counted in the graph of a step, when each
of its operations has a device: a tensor is sent once to each other device that needs it. Each call
adds the bytes to a variable on the chief. They are a constant, but for tensors whose shapes are
known only when the step runs: those are measured where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from keras_psplus.communication import Traffic
from keras_psplus.compression import Compressor
from keras_psplus.core.batch.replica_step import Key, TensorTraffic, TrafficVariables
from keras_psplus.pipeline.base import needed
from keras_psplus.pipeline.base.stages import Stages
from keras_psplus.pipeline.graph import devices
from keras_psplus.pipeline.replicas import Copies, ReplicaTransfer
from keras_psplus.tf_internals import framework_ops as ops

# Constants are wherever they are needed, and handles stay where they are.
_NOT_SENT = ("Const", "Placeholder", "Shape", "ShapeN", "Size", "Rank")


class Encoded(NamedTuple):
    """Tensors that are sent in fewer bytes.

    Attributes:
        payload: List of what is sent in their place.
        compressor: What has encoded them.
        path: Path of the variable whose gradient they are, or None.
    """

    tensors: list[tf.Tensor]
    payload: list[tf.Tensor]
    compressor: Compressor
    path: str | None = None


class PipelineTraffic:
    """Totals of one strategy, in variables on the chief.

    Args:
        host: Name of the chief's device.
    """

    def __init__(self, host: str, stages: Stages, copies: Copies) -> None:
        self._host, self._stages, self._copies = host, stages, copies
        self._totals = TrafficVariables(host)

    def count(
        self,
        graph: tf.Graph,
        results: Any,
        crossings: Iterable[ReplicaTransfer],
        encoded: Iterable[Encoded],
    ) -> None:
        """Lets each call of a step that is being traced count what it sends.

        Args:
            graph: Graph of the step, all of whose operations have devices.
            results: Structure of what the step returns.
        """
        sent = _Names(self._copies, graph, crossings, encoded).by_key(
            sorted(_sent(graph, results, self._stages), key=_order)
        )
        entries = []
        for (path, direction, compressor), tensors in sent.items():
            logical, compressed = (_bytes(one, self._host) for one in tensors)
            entries.append(
                TensorTraffic(
                    path, compressor, logical, compressed, wire=compressed, direction=direction
                )
            )
        self._totals.add(entries)

    def traffic(self) -> list[Traffic]:
        """List of `Traffic`, of all workers together."""
        return self._totals.traffic()


class _Transfer(NamedTuple):
    """A tensor that goes from one worker to another: their pipelines, and their stages."""

    tensor: tf.Tensor
    pipelines: tuple[int, int]
    stages: tuple[int, int]


def _order(sent: _Transfer) -> tuple[bool, tuple[int, ...]]:
    """Stages first, each way by itself, then what crosses between pipelines."""
    crosses = sent.pipelines[0] != sent.pipelines[1]
    return crosses, sent.stages if not crosses else ()


def _sent(graph: tf.Graph, results: Any, stages: Stages) -> Iterator[_Transfer]:
    run, device_of = needed.operations(graph, results), devices.where_run(graph)
    # Not in the order of the set, which differs from trace to trace.
    found = {
        (id(tensor), device_of(op)): tensor
        for op in graph.get_operations()
        if op in run
        for tensor in op.inputs
        if _is_data(tensor) and device_of(tensor.op) != device_of(op)
    }
    for (_, destination), tensor in found.items():
        source = device_of(tensor.op)
        first, last = stages.pipeline_of(source), stages.pipeline_of(destination)
        # The chief's batches and results are not counted.
        if first is not None and last is not None:
            of_stages = stages.of_device(source), stages.of_device(destination)
            yield _Transfer(tensor, (first, last), of_stages)


def _is_data(tensor: tf.Tensor) -> bool:
    """Whether a tensor is more than a number or a shape."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string) or tensor.op.type in _NOT_SENT:
        return False
    return tensor.shape.rank != 0


class _Names:
    """Names of sent tensors: the weight, or the pair of stages, that each belongs to."""

    def __init__(
        self,
        copies: Copies,
        graph: tf.Graph,
        crossings: Iterable[ReplicaTransfer],
        encoded: Iterable[Encoded],
    ) -> None:
        # By ids of tensors.
        self._encoded = {id(one): whole for whole in encoded for one in whole.payload}
        self._gradients = {
            id(leaf): crossing.copied.path
            for crossing in crossings
            for leaf in tf.nest.flatten(crossing.sent, expand_composites=True)
        }
        paths = {id(one.primary.handle): one.path for one in copies.every()}
        self._weights = {
            id(inside): paths[id(outside)]
            for outside, inside in graph.captures
            if id(outside) in paths
        }

    def by_key(self, found: list[_Transfer]) -> dict[Key, tuple[list[tf.Tensor], list[tf.Tensor]]]:
        """Groups sent tensors by key, as lists before and after compression."""
        result: dict[Key, tuple[list[tf.Tensor], list[tf.Tensor]]] = {}
        seen = set()
        for sent in found:
            whole = self._encoded.get(id(sent.tensor))
            path, direction = self._path(sent, whole)
            compressor = None if whole is None else repr(whole.compressor)
            logical, compressed = result.setdefault((path, direction, compressor), ([], []))
            compressed.append(sent.tensor)
            if whole is None:
                logical.append(sent.tensor)
            elif id(whole) not in seen:
                seen.add(id(whole))
                logical += whole.tensors
        return result

    def _path(self, sent: _Transfer, whole: Encoded | None) -> tuple[str, str]:
        of_gradient = self._gradients.get(id(sent.tensor)) if whole is None else whole.path
        (source, destination), stages = sent.pipelines, sent.stages
        if source == destination:
            direction = "forward" if stages[0] < stages[1] else "backward"
            return f"stage {stages[0]} -> stage {stages[1]}", direction
        if of_gradient is not None:
            return of_gradient, "gradient"
        op = sent.tensor.op
        of_weight = self._weights.get(id(op.inputs[0])) if op.type == "ReadVariableOp" else None
        if of_weight is not None:
            return of_weight, "weight"
        # The first pipeline gets all outputs, and sends the others the gradients of theirs.
        direction = "forward" if destination < source else "backward"
        return f"pipeline {source} -> pipeline {destination}", direction


def _bytes(tensors: Iterable[tf.Tensor], host: str) -> int | tf.Tensor:
    """Bytes of some tensors: an int, or a scalar, as some shapes are unknown."""
    known = 0
    measured: dict[str, list[tf.Tensor]] = {}
    for tensor in tensors:
        count = tensor.shape.num_elements()
        if count is not None:
            known += count * tensor.dtype.size
            continue
        with ops.device(tensor.op.device):
            size = tf.size(tensor, tf.int64) * tensor.dtype.size
        measured.setdefault(tensor.op.device, []).append(size)
    totals = []
    for device, sizes in measured.items():
        with ops.device(device):
            totals.append(tf.add_n(sizes))
    if not totals:
        return known
    with ops.device(host):
        return tf.add_n([tf.constant(known, tf.int64), *totals])
