"""The order of two calls of a step's function that run at the same time.

Each call runs the operations on a stage's state (averages of BatchNormalization, seeds, metrics)
after those of the call before. TensorFlow orders operations inside of a call only.
"""

from __future__ import annotations

from collections.abc import Collection

import tensorflow as tf

from keras_psplus.pipeline.base.stages import host_of
from keras_psplus.tf_internals import framework_ops as ops

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

    Returns:
        List of some of these ids.
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
