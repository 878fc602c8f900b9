"""Gives operations that belong to no layer a device: that of their largest input.

What is between layers (a skip connection's sum, the join of micro-batches), losses, metrics, the
sums of a variable's gradients and what an optimizer does to them would otherwise run on the chief,
and everything that they need would be sent there and back. Of inputs of one size, the one nearest
to where the result is needed counts. What is computed of the batch alone runs where its results are
used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tensorflow as tf

from keras_psplus.pipeline.base.stages import Stages
from keras_psplus.tf_internals import framework_ops

# What a dimension that is not known counts as.
_UNKNOWN = 64
# They need to know a tensor's shape, not the tensor, which must not be sent for that.
_SHAPES = ("Shape", "ShapeN", "Size", "Rank")


def place(graph: tf.Graph, first: int, stages: Stages) -> list[tf.Operation]:
    """Places the operations of a graph that have no device.

    Args:
        first: How many of its operations are left alone.

    Returns:
        List of the operations that it has placed, without constants.
    """
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
    """Devices on which TensorFlow runs the operations of a placed graph.

    Returns:
        Function of an operation that returns the name of a device: that of its variable, if it has
        one, whatever device it was given.
    """
    captured = _devices_of_captures(graph)
    return lambda op: _resource_device(op, captured) or op.device


def keep_results_where_they_are(graph: tf.Graph) -> None:
    """Has operations that are still to be added run where their inputs are.

    TensorFlow adds one for each result of a function, which would send it to the chief.
    """

    def device_of_inputs(op: tf.Operation) -> str:
        return op.device or next((tensor.device for tensor in op.inputs if tensor.device), "")

    graph._add_device_to_stack(device_of_inputs)


def of_consumers(tensors: list[tf.Tensor]) -> str | None:
    """Device of the first operation that uses one of some tensors, if it has one."""
    for tensor in tensors:
        for op in tensor.consumers():
            if op.device and op.type not in _SHAPES:
                return op.device
    return None


def _devices_of_captures(graph: tf.Graph) -> dict[int, str]:
    """Devices of captured resources, by the ids of the tensors that represent them."""
    return {
        id(inside): outside.device
        for outside, inside in getattr(graph, "captures", ())
        if inside.dtype == tf.resource and isinstance(outside, framework_ops.EagerTensor)
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

    A residual connection's sum is needed on the later stage, and a sum of gradients on the earlier.
    Otherwise each sum of a transformer's later stages would be on the first, and travel each way.
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
