"""Barrier between steps: all writes to a table precede the next step's reads.

A variable of each replica connects its pushes, the step's last collective and its next lookups:
TensorFlow keeps operations on one variable in their order, also over branches and loops.
"""

import tensorflow as tf

from keras_psplus.all_reduce.extended import MultiWorkerMirroredExtended


class Barrier:
    """Barrier after each step's pushes, which adds a number to an existing collective.

    Args:
        extended: `MultiWorkerMirroredExtended`: the replicas, and variables of their steps.
    """

    _NAME = "tables"

    def __init__(self, extended: MultiWorkerMirroredExtended) -> None:
        self._extended = extended

    def _variable(self) -> tf.Variable:
        return self._extended.step_variable(self._NAME)

    def note_pushed(self, answers: list[tf.Tensor]) -> None:
        """Notes that servers have answered to what this replica has pushed."""
        with tf.control_dependencies(answers):
            self._variable().assign(0.0, read_value=False)

    def token(self) -> tf.Tensor:
        """Scalar to sum over replicas, available once this replica's pushes are done."""
        return self._variable().read_value()

    def release(self, total: tf.Tensor) -> None:
        """Notes that all replicas have arrived: `total` is the sum."""
        self._variable().assign(total * 0.0, read_value=False)

    def passed(self) -> tf.Tensor:
        """A tensor that is there once what was before the last `release` is done."""
        return self._variable().read_value()

    def wait(self) -> tf.Tensor:
        """Waits in the middle of a step for all replicas; returns a control tensor."""
        self.release(self._extended.sum_over_replicas([self.token()])[0])
        return self.passed()
