"""Gives operations that belong to no layer a device: that of their largest input.

What is between layers (a skip connection's sum, the join of micro-batches), losses, metrics, the
sums of a variable's gradients and what an optimizer does to them would otherwise run on the chief,
and everything that they need would be sent there and back. Of inputs of one size, the one nearest
to where the result is needed counts. What is computed of the batch alone runs where its results are
used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import tensorflow as tf

from keras_psplus.pipeline.base.stages import Stages, host_of
from keras_psplus.tf_internals import framework_ops
from keras_psplus.tf_internals import framework_ops as ops

# The order of two calls of a step's function that run at the same time.
#
# Each call runs the operations on a stage's state (averages of BatchNormalization, seeds, metrics)
# after those of the call before. TensorFlow orders operations inside of a call only.


_CHANGES = ("Assign", "ResourceScatter", "ResourceApply", "ResourceSparseApply")
# What does not change a variable.
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")


def state_operations(graph: tf.Graph, weights: Collection[int]) -> dict[str, list[tf.Operation]]:
    """Operations on variables that a graph changes, by their devices.

    Args:
        graph: Graph of a function, all of whose operations have devices.
        weights: Ids of the handles of variables that are left out.
    """
    found: dict[str, list[tf.Operation]] = {}
    for outside, inside in graph.captures:
        if inside.dtype != tf.resource or id(outside) in weights:
            continue
        users = inside.consumers()
        if any(op.type not in READS for op in users):
            for op in users:
                found.setdefault(op.device, []).append(op)
    return found


def changed(graph: tf.Graph, weights: Collection[int]) -> list[int]:
    """Those of some variables that a graph changes.

    Args:
        weights: Ids of the variables' handles.
    """
    return [
        id(outside)
        for outside, inside in graph.captures
        if id(outside) in weights and any(op.type.startswith(_CHANGES) for op in inside.consumers())
    ]


class Tokens:
    """A token for each device, which goes from call to call.

    A call takes it before its first operation on the device's state and hands it on after the last.
    It goes through two queues in turn, so that the call after the next cannot be the first to take
    it.
    """

    def __init__(self) -> None:
        # By devices: the ids of the handles that graphs have captured, and the queues in use.
        self._captured: dict[str, tuple[int, ...]] = {}
        self._queues: dict[str, tuple[tf.queue.FIFOQueue, tf.queue.FIFOQueue]] = {}
        # Graphs know them by their handles.
        self._first_queues: list[tuple[tf.queue.FIFOQueue, tf.queue.FIFOQueue]] = []

    def chain(self, operations: dict[str, list[tf.Operation]]) -> None:
        """Orders operations of a graph being traced after those of the previous call.

        Args:
            operations: As `state_operations` returns them.
        """
        for device, of_device in operations.items():
            if device not in self._captured:
                self._first_queues.append(_make_queues(device))
                self._queues[device] = self._first_queues[-1]
                self._captured[device] = tuple(id(q.queue_ref) for q in self._queues[device])
            taken_from, given_to = self._first_queues[list(self._captured).index(device)]
            with ops.device(host_of(device)), ops.control_dependencies(None):
                token = taken_from.dequeue()
                for op in of_device:
                    op._add_control_input(token.op)
                with ops.control_dependencies(of_device):
                    given_to.enqueue(token)

    def handles(self, turn: int) -> dict[int, tf.Tensor]:
        """Queues of a call, by the ids of the captured handles that they replace.

        Args:
            turn: Number of the call, from 0; consecutive ones run at the same time.
        """
        return {
            handle: self._queues[device][(i + turn) % 2].queue_ref
            for device, handles in self._captured.items()
            for i, handle in enumerate(handles)
        }

    def reset(self) -> None:
        """Gives the tokens to the next call, which is to have number 0.

        Calls that wait for a token end with an error.
        """
        for device, pair in self._queues.items():
            for queue in pair:
                queue.close(cancel_pending_enqueues=True)
            self._queues[device] = _make_queues(device)


def _make_queues(device: str) -> tuple[tf.queue.FIFOQueue, tf.queue.FIFOQueue]:
    """Two queues, of which the first has the token."""
    with tf.init_scope(), tf.device(host_of(device)):
        pair = tuple(tf.queue.FIFOQueue(1, [tf.int32], [[]]) for _ in range(2))
        pair[0].enqueue(0)
    return pair


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
