"""Two versions of a model's weights, for two batches in flight."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_psplus.pipeline.extended import making_on


class WeightVersions:
    """Copies of variables, on their devices.

    TensorFlow shares the memory of a copy with its variable until that is changed, so there are two
    versions of dense weights in memory, not three.

    Args:
        variables: Keras variables that have values.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, variables: Sequence[keras.Variable]
    ) -> None:
        self.variables = list(variables)
        self._copies: list[list[tf.Variable]] = [[], []]
        for variable in self.variables:
            for copies in self._copies:
                device = variable._value.device
                # In the strategy's scope, variables are on the last stage by default.
                with tf.init_scope(), making_on(strategy, device), tf.device(device):
                    copies.append(tf.Variable(variable._value.read_value(), trainable=False))

    def are_of(self, variables: Sequence[keras.Variable]) -> bool:
        """Whether these are the versions of some Keras variables."""
        handles = [id(variable._value.handle) for variable in variables]
        return handles == [id(variable._value.handle) for variable in self.variables]

    def handles(self, turn: int) -> dict[int, tf.Tensor]:
        """Copies of variables for a call, by ids of the handles that they replace.

        Args:
            turn: Number of the call.
        """
        copies = self._copies[turn % 2]
        return {id(v._value.handle): copy.handle for v, copy in zip(self.variables, copies)}

    def assign(self, turn: int) -> None:
        """Makes the version for a call of what the variables are now.

        Args:
            turn: Number of the call.
        """
        for variable, copy in zip(self.variables, self._copies[turn % 2]):
            with tf.device(variable._value.device):
                copy.assign(variable._value.read_value())
