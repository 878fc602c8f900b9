"""Arguments of a layer's call, so that it can be repeated with other tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from keras_psplus.keras_internals.keras_parts import get_keras_mask, set_keras_mask, tree

# What a dimension that is not known counts as, but for the rows.
_UNKNOWN = 64
_PLAIN = (type(None), bool, int, float, str)


@dataclasses.dataclass(frozen=True)
class TensorForm:
    """The form of a tensor.

    Attributes:
        shape: Tuple of its dimensions, None for those that are not known.
        dtype: Name of its dtype.
        has_gradient: Whether a gradient by it is needed in training: not by the batch itself.
    """

    shape: tuple[int | None, ...]
    dtype: str
    has_mask: bool
    has_gradient: bool


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Attributes:
        args: Its arguments, with a `TensorForm` in the place of each tensor.
        kwargs: Its keyword arguments, likewise.
        rows: Rows of the batch that it was called with.
    """

    args: Any
    kwargs: Any
    rows: int

    def make(self, rows: int, draw: Callable[..., tf.Tensor]) -> tuple[Any, Any, list[tf.Tensor]]:
        """Makes arguments for a call.

        Args:
            draw: Function of a shape and a dtype that returns a tensor.

        Returns:
            The arguments, the keyword arguments, and those of their tensors whose gradients are
            needed.
        """
        sources = []

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, TensorForm):
                return leaf
            shape = self._shape(leaf.shape, rows)
            tensor = draw(shape, tf.as_dtype(leaf.dtype))
            if leaf.has_mask:
                # A mask has no entry for each feature.
                set_keras_mask(tensor, tf.fill(shape[:-1] if len(shape) > 2 else shape, True))
            if leaf.has_gradient and tensor.dtype.is_floating:
                sources.append(tensor)
            return tensor

        made = tree.map_structure(one, (self.args, self.kwargs))
        return *made, sources

    def _shape(self, shape: Iterable[int | None], rows: int) -> list[int]:
        sizes = [_UNKNOWN if size is None else size for size in shape]
        if sizes and sizes[0] % self.rows == 0:
            sizes[0] = sizes[0] // self.rows * rows
        return sizes


def record_call(
    args: Any, kwargs: Any, rows: int, is_given: Callable[[Any], bool]
) -> LayerCall | None:
    """Notes a call.

    Args:
        is_given: Function of a tensor that tells whether it is a part of the batch.

    Returns:
        A `LayerCall`; None if the layer was called with something else than dense tensors of a
        known rank, numbers and texts.
    """
    leaves = tree.flatten((args, kwargs))
    if not all(isinstance(leaf, _PLAIN) or _has_form(leaf) for leaf in leaves):
        return None

    def form(leaf: Any) -> Any:
        if not isinstance(leaf, tf.Tensor):
            return leaf
        has_mask = get_keras_mask(leaf) is not None
        return TensorForm(tuple(leaf.shape), leaf.dtype.name, has_mask, not is_given(leaf))

    return LayerCall(tree.map_structure(form, args), tree.map_structure(form, kwargs), rows)


def _has_form(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.shape.rank is not None
