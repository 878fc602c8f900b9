"""Requested placement of the tables of KerasRS's `DistributedEmbedding`."""

from collections.abc import Callable
from typing import Any

import keras

from keras_psplus.engine import Engine

PARAMETER_SERVER, MIRRORED, AUTO = "parameter_server", "mirrored", "auto"
# What KerasRS calls the places that `HybridStrategy` knows by other names.
_KERAS_RS_MIRRORED = "default_device"


class KerasRSPlacement(Engine):
    """Notes for each embedding where its table wants to lie, whatever the strategy will be."""

    def take_in(
        self, original: Callable[..., Any], layer: keras.Layer, feature_configs: Any
    ) -> None:
        """Checks the tables; KerasRS refuses the placement `"parameter_server"`."""
        configs = keras.tree.flatten(feature_configs)
        tables = {id(c.table): c.table for c in configs if hasattr(c.table, "placement")}
        served = [t for t in tables.values() if t.placement == PARAMETER_SERVER]
        for table in served:
            table.placement = _KERAS_RS_MIRRORED
        try:
            original(layer, feature_configs)
        finally:
            for table in served:
                table.placement = PARAMETER_SERVER

    def make_layers(
        self,
        original: Callable[..., Any],
        layer: keras.Layer,
        feature_configs: dict[Any, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Makes the embeddings of the tables."""
        original(layer, feature_configs, *args, **kwargs)
        for path, config in feature_configs.items():
            wish = config.table.placement
            if wish != AUTO:
                embedding = layer._default_device_embedding_layers[path]
                embedding._keras_rs_placement = MIRRORED if wish == _KERAS_RS_MIRRORED else wish
