"""Order of sends along one hop of a topology.

Sends wait for earlier ones, so that what is sent first arrives first.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from keras_psplus.all_reduce.collectives import gradients

# Buckets that are on a hop at once. All of them at once would share its link and arrive together:
# none would be between groups while others are summed inside, nor be handed on while others are
# between groups.
INSIDE, BETWEEN = 1, 2


class HopOrder:
    """Limits the number of concurrent sends along one hop.

    All replicas of a hop have to send in the same order.

    Args:
        at_once: Maximum number of concurrent sends.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._arrived: list[list[tf.Tensor]] = []

    def wait(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns `tensors`, made to wait for earlier sends on the hop."""
        before = self._arrived[-self._at_once] if len(self._arrived) >= self._at_once else []
        return [gradients.after(before, tensor) for tensor in tensors]

    def end(self, tensors: list[tf.Tensor]) -> None:
        """Marks the last send as complete; `tensors` are its results."""
        self._arrived.append(tensors)
