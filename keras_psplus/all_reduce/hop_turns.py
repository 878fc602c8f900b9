"""What goes along one hop of a topology takes turns, so that what is first arrives first."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_psplus.all_reduce import gradients

# Buckets that are on a hop at once. All of them at once would share its link and arrive together:
# none would be between groups while others are summed inside, nor be handed on while others are
# between groups.
INSIDE, BETWEEN = 1, 2


class Turns:
    """Has what goes along one hop wait until only so many are before it.

    All replicas of a hop have to take their turns in the same order.

    Args:
        at_once: How many may be on their way.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._arrived: list[list[tf.Tensor]] = []

    def wait(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns what is to be sent, as it is when its turn has come."""
        before = self._arrived[-self._at_once] if len(self._arrived) >= self._at_once else []
        return [gradients.after(before, tensor) for tensor in tensors]

    def end(self, tensors: list[tf.Tensor]) -> None:
        """Ends the turn of what was sent last: this is what has come of it."""
        self._arrived.append(tensors)
