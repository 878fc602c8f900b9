"""Locks between concurrent steps of one worker.

Two steps of one worker that read the variables at once would each take twice as long, and then both
compute, and both send: nothing would be gained. With a lock, the reads of the next step overlap
with this step's gradients, and the worker's link is used in both directions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from keras_psplus.tf_internals import framework_ops as ops


class ReadLock:
    """Lock that a worker function holds while it reads its first values.

    Created while the function is traced. A step that fails releases the lock.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._graph = ops.get_default_graph()
        self._lock: tf.Tensor | None = None
        self._starts: dict[str, tf.Operation] = {}
        self._is_over = False

    def start_on(self, device: str, graph: tf.Graph) -> list[tf.Operation]:
        """Operations on a server that reads must wait for; none in branches."""
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
        """Releases the lock after an operation; later reads need none."""
        if self._lock is not None and not self._is_over:
            with self._graph.as_default(), ops.control_dependencies([arrival]), ops.device(None):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=self._lock)
        self._is_over = True


@contextlib.contextmanager
def writing_states(turn: ReadLock | None, after: Sequence[tf.Tensor]) -> Iterator[None]:
    """Context that locks a worker's states, if it runs steps together.

    One of the tensors `after` has to be there before the lock is taken.
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


def _acquire(name: str) -> tf.Tensor:
    with ops.device(None):
        mutex = tf.raw_ops.MutexV2(shared_name=name)
        return tf.raw_ops.MutexLock(mutex=mutex)
