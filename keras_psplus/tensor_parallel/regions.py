"""Regions of a step in which tensors are local, and functions that leave them so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_psplus.tensor_parallel.group import ModelGroup

_ELEMENTWISE = frozenset(
    "celu elu exponential gelu gelu_approximate hard_shrink hard_sigmoid hard_silu hard_swish "
    "hard_tanh leaky_relu linear log_sigmoid mish quick_gelu relu relu6 selu sigmoid silu "
    "soft_shrink softplus softsign sparse_plus sparse_sigmoid squareplus swish tanh tanh_shrink "
    "threshold".split()
)
_PACKAGES = ("keras", "keras_hub")


def is_elementwise(activation: Any) -> bool:
    """Whether an activation is known to compute each element by itself."""
    if activation is None:
        return True
    package = str(getattr(activation, "__module__", "")).partition(".")[0]
    return package in _PACKAGES and getattr(activation, "__name__", "") in _ELEMENTWISE


class Regions:
    """Parts of a step in which tensors are local, or weights whole.

    Attributes:
        are_local: Whether cut kernels compute local parts and summands, as inside of attention by
            heads, and no worker talks to another.
        are_whole: Whether inner layers are called with gathered weights.
    """

    def __init__(self) -> None:
        self.are_local = self.are_whole = False

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Context in which what cut kernels take and compute stays local."""
        outer, self.are_local = self.are_local, True
        try:
            yield
        finally:
            self.are_local = outer

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Context in which inner layers are called as in one process."""
        outer, self.are_whole = self.are_whole, True
        try:
            yield
        finally:
            self.are_whole = outer

    def enter(self, whole: Any, group: ModelGroup) -> tf.Tensor:
        """A whole tensor that each worker multiplies by its part of a kernel."""
        return whole if self.are_local else group.enter(whole)

    def finish(self, local: Any, axis: int, activation: Any, group: ModelGroup) -> Any:
        """Output of a layer of a local tensor: its activation, and the whole of it.

        Args:
            axis: Axis along which it is cut.
            activation: The layer's activation, or None.
        """
        if is_elementwise(activation):
            local = local if activation is None else activation(local)
            return local if self.are_local else group.stack(local, axis)
        return activation(group.stack(local, axis))
