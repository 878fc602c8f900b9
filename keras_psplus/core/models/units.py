"""Units: layers that run, or whose weights travel, as one piece."""

from __future__ import annotations

import weakref
from typing import TypeVar

import keras

LayerT = TypeVar("LayerT", bound=keras.Layer)
_units: weakref.WeakSet[keras.Layer] = weakref.WeakSet()


def unit(layer: LayerT) -> LayerT:
    """Makes a layer, or a nested model, a unit of `shard="all"`.

    Its weights are gathered together and freed together. Layers that contain it are no units, and
    other layers in them are units of their own; weights of such a layer itself are gathered as they
    are read. Elsewhere a mark does nothing. Marks are not saved with a model.

    Args:
        layer: `keras.Layer`.

    Returns:
        The layer.

    Raises:
        ValueError: If it is no layer.

    Example:

    ```python
    class Encoder(keras.layers.Layer):
        def __init__(self, depth):
            super().__init__()
            self.blocks = [keras_psplus.unit(Block()) for _ in range(depth)]
    ```
    """
    if not isinstance(layer, keras.Layer):
        raise ValueError(f"`unit` takes a `keras.Layer`. Received: {layer!r}")
    _units.add(layer)
    return layer


def is_unit(layer: keras.Layer) -> bool:
    """Whether a layer that lies in no unit is one."""
    if layer in _units:
        return True
    if isinstance(layer, keras.Model):
        return False
    return not any(one in _units for one in layer._flatten_layers(include_self=False))
