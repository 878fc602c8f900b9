"""A count by which the host chooses what a replica's step does."""

from collections.abc import Callable

import tensorflow as tf

from keras_psplus.updates.base import States

_HOST = "CPU:0"


class HostCount:
    """An int64 of a replica's own, kept and compared on the host.

    On a GPU, each comparison would have the host wait for it.

    Args:
        states: `States` of the replica.
        name: Its name.
    """

    def __init__(self, states: States, name: str) -> None:
        self._variable = states.variable(name, [], tf.int64, on_host=True)

    def read(self) -> tf.Tensor:
        """The count as of now."""
        return self._variable.read_value()

    def satisfies(self, condition: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Whether the count satisfies a condition, a predicate of `tf.cond`."""
        with tf.device(_HOST):
            return condition(self.read())

    def update(self, function: Callable[[tf.Tensor], tf.Tensor]) -> None:
        """Replaces the count by a function of it."""
        with tf.device(_HOST):
            self._variable.assign(function(self.read()), read_value=False)

    def add_one(self) -> None:
        """Counts one more."""
        with tf.device(_HOST):
            self._variable.assign_add(1, read_value=False)

    def set(self, value: int) -> None:
        """Sets the count."""
        with tf.device(_HOST):
            self._variable.assign(value, read_value=False)
