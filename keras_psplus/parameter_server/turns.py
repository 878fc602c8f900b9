"""The steps that a worker has under way at the same time take turns at what they share.

Two steps of one worker that read the variables together would each take twice as long, and then
both compute, and both send: nothing would be won. One after the other, the reads of the next step
come while this one's gradients go, and the worker's link is used both ways.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from keras_psplus.tf_internals import framework_ops as ops


class ReadTurn:
    """What a worker function reads first, it reads when no other function of its worker does.

    Made while the function is traced. A step that fails gives its turn to the next one.

    Args:
        name: Of the turn, a resource of each worker.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._graph = ops.get_default_graph()
        self._lock: tf.Tensor | None = None
        self._starts: dict[str, tf.Operation] = {}
        self._is_over = False

    def start_on(self, device: str, graph: tf.Graph) -> list[tf.Operation]:
        """What reading has to wait for, on a server: a list of one operation there, or none.

        Args:
            device: Name of the server's device.
            graph: Where it is read. In branches and loops, nothing is waited for.
        """
        if self._is_over or graph is not self._graph:
            return []
        if self._lock is None:
            self._lock = _acquire(f"{self.name}/reads")
        if device not in self._starts:
            # One message to each server instead of one for each variable.
            with ops.device(device), ops.control_dependencies([self._lock.op]):
                self._starts[device] = tf.no_op()
        return [self._starts[device]]

    def end(self, arrival: tf.Operation) -> None:
        """Has the turn end when an operation is done; what is read from here on needs none."""
        if self._lock is not None and not self._is_over:
            with self._graph.as_default(), ops.control_dependencies([arrival]), ops.device(None):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=self._lock)
        self._is_over = True


@contextlib.contextmanager
def writing_states(turn: ReadTurn | None, after: Sequence[tf.Tensor]) -> Iterator[None]:
    """Context of what reads states of a worker and writes them: no other step does meanwhile.

    Args:
        turn: That in which the function reads; None if its worker runs no other beside it.
        after: Tensors, of which one has to be there before the turn begins.
    """
    after = [tensor for tensor in after if tensor is not None]
    if turn is None or not after:
        yield
        return
    graph = ops.get_default_graph()
    with ops.control_dependencies(None), ops.control_dependencies([after[-1].op]):
        lock = _acquire(f"{turn.name}/states")
    count = len(graph.get_operations())
    with ops.control_dependencies([lock.op]):
        yield
    made = graph.get_operations()[count:]
    writes = [op for op in made if op.type == "AssignVariableOp" and "/job:ps" not in op.device]
    with ops.control_dependencies(writes), ops.device(None):
        tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)


def _acquire(name):
    with ops.device(None):
        mutex = tf.raw_ops.MutexV2(shared_name=name)
        return tf.raw_ops.MutexLock(mutex=mutex)
