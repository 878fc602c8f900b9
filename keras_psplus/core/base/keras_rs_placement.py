"""Requested placement of the tables of KerasRS's `DistributedEmbedding`."""

import keras

from keras_psplus.engine import Call

PARAMETER_SERVER, MIRRORED, AUTO = "parameter_server", "mirrored", "auto"
# What KerasRS calls the places that `HybridStrategy` knows by other names.
_KERAS_RS_MIRRORED = "default_device"


class KerasRSPlacement:
    """Notes for each embedding where its table wants to lie, whatever the strategy will be."""

    def take_in(self, call: Call) -> None:
        """Checks the tables; KerasRS refuses the placement `"parameter_server"`."""
        configs = keras.tree.flatten(call.get("feature_configs"))
        tables = {id(c.table): c.table for c in configs if hasattr(c.table, "placement")}
        served = [t for t in tables.values() if t.placement == PARAMETER_SERVER]
        for table in served:
            table.placement = _KERAS_RS_MIRRORED
        try:
            call.proceed()
        finally:
            for table in served:
                table.placement = PARAMETER_SERVER

    def make_layers(self, call: Call) -> None:
        """Makes the embeddings of the tables."""
        call.proceed()
        for path, config in call.get("feature_configs").items():
            wish = config.table.placement
            if wish != AUTO:
                embedding = call.owner._default_device_embedding_layers[path]
                embedding._keras_rs_placement = MIRRORED if wish == _KERAS_RS_MIRRORED else wish
