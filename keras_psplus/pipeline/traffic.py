"""Devices of a step's operations, and what goes from stage to stage and between pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from keras_psplus.communication import Traffic
from keras_psplus.compression import Compressor
from keras_psplus.core.batch.replica_step import Key, TensorTraffic, TrafficVariables
from keras_psplus.core.graph.subgraph import with_inputs
from keras_psplus.pipeline.replicas import Copies, ReplicaTransfer
from keras_psplus.pipeline.stages import Stages
from keras_psplus.tf_internals import framework_ops as ops

# Operations that belong to no layer get a device: that of their largest input.
#
# Operations between layers (a skip connection's sum, the join of micro-batches), losses, metrics,
# sums of a variable's gradients and the updates of an optimizer would otherwise run on the
# chief, and everything that they need would be sent there and back. Of inputs of one size, the one
# nearest to where the result is needed counts. Operations on the batch alone run where their
# results are used.


# Size that an unknown dimension counts as.
_UNKNOWN = 64
# They need to know a tensor's shape, not the tensor, which must not be sent for that.
_SHAPES = ("Shape", "ShapeN", "Size", "Rank")


def place(graph: tf.Graph, first: int, stages: Stages) -> list[tf.Operation]:
    """Places operations of a graph that have no device; returns those, but for constants."""
    operations = graph.get_operations()[first:]
    captured = _devices_of_captures(graph)
    placed = []
    for op in operations:
        if not op.device and op.type != "Placeholder":
            device = _resource_device(op, captured) or _device_of_largest(op, stages)
            if device:
                op._set_device(device)
                placed.append(op)
    for op in reversed(operations):
        if not op.device and op.type not in ("Placeholder", *_SHAPES):
            of_users = of_consumers(op.outputs)
            if of_users:
                op._set_device(of_users)
                placed.append(op)
    for op in operations:
        if not op.device and op.type in _SHAPES:
            op._set_device(op.inputs[0].op.device or of_consumers([op.inputs[0]]) or "")
    return [op for op in placed if op.type != "Const"]


def where_run(graph: tf.Graph) -> Callable[[tf.Operation], str]:
    """Function of a placed graph's operations that returns where TensorFlow runs them.

    That is with its variable, if it has one, whatever device it was given.
    """
    captured = _devices_of_captures(graph)
    return lambda op: _resource_device(op, captured) or op.device


def of_consumers(tensors: list[tf.Tensor]) -> str | None:
    """Device of the first operation that uses one of some tensors, if it has one."""
    for tensor in tensors:
        for op in tensor.consumers():
            if op.device and op.type not in _SHAPES:
                return op.device
    return None


def _devices_of_captures(graph: tf.Graph) -> dict[int, str]:
    return {
        id(inside): outside.device
        for outside, inside in getattr(graph, "captures", ())
        if inside.dtype == tf.resource and isinstance(outside, ops.EagerTensor)
    }


def _resource_device(op: tf.Operation, captured: Mapping[int, str]) -> str | None:
    for tensor in op.inputs:
        if tensor.dtype == tf.resource:
            return captured.get(id(tensor)) or tensor.op.device
    return None


def _device_of_largest(op: tf.Operation, stages: Stages) -> str:
    largest, device = -1, ""
    for tensor in op.inputs:
        size, own = _size(tensor), tensor.op.device
        if not own or size < largest:
            continue
        if size > largest or _is_nearer(op, own, device, stages):
            largest, device = size, own
    return device


def _is_nearer(op: tf.Operation, one: str, other: str, stages: Stages) -> bool:
    """Whether what an operation computes is needed on one device rather than on another.

    A residual connection's sum is needed on the later stage, and a sum of gradients on the earlier;
    else each sum of a transformer's later stages would be on the first.
    """
    pipeline = stages.pipeline_of(one)
    if pipeline is None or pipeline != stages.pipeline_of(other):
        return False
    of_one, of_other = stages.of_device(one), stages.of_device(other)
    return of_one < of_other if op.type == "AddN" else of_one > of_other


def _size(tensor: tf.Tensor) -> int:
    if tensor.shape.rank is None:
        return _UNKNOWN
    size = max(1, tensor.dtype.size)
    for dimension in tensor.shape:
        size *= _UNKNOWN if dimension is None else dimension
    return size


# They change nothing, though TensorFlow counts them as if they did.
_READS = ("Placeholder", "ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarHandleOp")


def operations(graph: tf.Graph, results: Any) -> set[tf.Operation]:
    """The operations whose results are returned, or change something."""
    waiting = [leaf.op for leaf in tf.nest.flatten(results, expand_composites=True) if _is_in(leaf)]
    for op in graph.get_operations():
        if op._is_stateful and op.type not in _READS:
            waiting.append(op)
    return with_inputs(waiting)


def _is_in(leaf: Any) -> bool:
    return tf.is_tensor(leaf) and hasattr(leaf, "graph")


# TensorFlow's runtime sends tensors by itself, so they are counted in the graph of a step, when
# each of its operations has a device: a tensor is sent once to each other device that needs it.
# Each call adds the bytes to a variable on the chief. They are a constant, but for tensors whose
# shapes are known only when the step runs: those are measured where they are.


# Constants are wherever they are needed, and handles stay where they are.
_NOT_SENT = ("Const", "Placeholder", "Shape", "ShapeN", "Size", "Rank")


class Encoded(NamedTuple):
    """Tensors, a variable's gradient or not, that are sent in fewer bytes."""

    tensors: list[tf.Tensor]
    payload: list[tf.Tensor]
    compressor: Compressor
    path: str | None = None


class PipelineTraffic:
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
        """Lets each call of a step that is being traced count what it sends."""
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
        return self._totals.traffic()


class _Transfer(NamedTuple):
    """A tensor that goes from one worker to another: their pipelines, and their stages."""

    tensor: tf.Tensor
    pipelines: tuple[int, int]
    stages: tuple[int, int]


def _order(sent: _Transfer) -> tuple[bool, tuple[int, ...]]:
    crosses = sent.pipelines[0] != sent.pipelines[1]
    return crosses, sent.stages if not crosses else ()


def _sent(graph: tf.Graph, results: Any, stages: Stages) -> Iterator[_Transfer]:
    run, device_of = operations(graph, results), where_run(graph)
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


# Shorter rows are sent as they are: their message costs more than their bytes.
_LEAST_ELEMENTS = 1024


def compress_activations(
    graph: tf.Graph,
    activations: Iterable[tf.Tensor],
    gradients: Iterable[tf.Tensor],
    between: Iterable[tf.Operation],
    stages: Stages,
    compressor: Compressor,
    scale: tf.Tensor | None,
) -> list[Encoded]:
    """Compresses activations between stages: encoded by the sender, decoded by the receiver.

    Each row is encoded by itself, so that a row's results do not depend on the others. What
    operations `between` layers compute from activations counts as activations, and from their
    gradients as gradients, which are sent without the loss `scale`.
    """
    sent = {id(tensor): (tensor, False) for tensor in activations}
    sent |= {id(tensor): (tensor, True) for tensor in gradients}
    for op in between:
        are_gradients = [sent[id(tensor)][1] for tensor in op.inputs if id(tensor) in sent]
        if are_gradients:
            sent.update((id(tensor), (tensor, any(are_gradients))) for tensor in op.outputs)
    decoded: dict[tuple[int, str], tf.Tensor] = {}
    encoded = []
    for tensor, is_gradient in sent.values():
        pipeline = stages.pipeline_of(tensor.device)
        if not _is_worth_it(tensor) or pipeline is None:
            continue
        for consumer in tensor.consumers():
            # Operations that join the outputs of pipelines get them as they are.
            if consumer.device == tensor.device or stages.pipeline_of(consumer.device) != pipeline:
                continue
            key = id(tensor), consumer.device
            if key not in decoded:
                ends = tensor.device, consumer.device
                own_scale = scale if is_gradient else None
                payload, decoded[key] = _over(graph, tensor, ends, compressor, own_scale)
                encoded.append(Encoded([tensor], payload, compressor))
            for i, given in enumerate(consumer.inputs):
                if given is tensor:
                    consumer._update_input(i, decoded[key])
    return encoded


def compress_gradients(
    graph: tf.Graph,
    transfers: Iterable[ReplicaTransfer],
    compressor: Compressor,
    scale: tf.Tensor | None,
) -> list[Encoded]:
    """Compresses gradients between pipelines, of which a primary's worker decodes each.

    The sum of the pipeline that has the primary goes nowhere, and is left as it is. Gradients are
    sent without the loss `scale`.
    """
    encoded = []
    for transfer in transfers:
        weight, primary = transfer.copied.variable(), transfer.copied.primary
        arrived, sent = transfer.arrived, transfer.sent
        beside = []
        if isinstance(sent, tf.IndexedSlices):
            beside, sent, arrived = [sent.indices], sent.values, arrived.values
        own = None
        if weight is not None and arrived.graph is graph and primary.shape.rank:
            own = compressor.for_variable(weight.path, primary.shape, primary.dtype)
        if own is None:
            continue
        ends = transfer.copied.copies[transfer.pipeline].device, primary.device
        shape = tf.TensorShape([None if beside else primary.shape[0], *primary.shape[1:]])
        with ops.device(ends[0]):
            rows = tf.ensure_shape(sent, shape)
        payload, decoded = _over(graph, rows, ends, own, scale)
        arrived.op._update_input(0, decoded)
        encoded.append(Encoded([sent, *beside], [*payload, *beside], own, weight.path))
    return encoded


def _is_worth_it(tensor: tf.Tensor) -> bool:
    shape = tensor.shape
    if tensor.dtype != tf.float32 or not shape.rank:
        return False
    of_row = shape[1:].num_elements()
    # Compressors need to know the form of a row.
    return of_row is not None and of_row * (shape[0] or 1) >= _LEAST_ELEMENTS


def _over(
    graph: tf.Graph,
    tensor: tf.Tensor,
    ends: tuple[str, str],
    compressor: Compressor,
    scale: tf.Tensor | None,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Payload that leaves the first of two devices, and the tensor on the second."""
    step = tf.constant(0, tf.int64)
    with graph.as_default(), ops.control_dependencies(None):
        scale = None if scale is None else tf.cast(scale, tensor.dtype)
        with ops.device(ends[0]):
            rows = tensor if scale is None else tensor / scale
            payload = compressor.encode_rows(rows, step)
        with ops.device(ends[1]):
            decoded = compressor.decode_rows(payload, tensor.shape[1:], tensor.dtype, step)
            decoded = decoded if scale is None else decoded * scale
    return tf.nest.flatten(payload), decoded
