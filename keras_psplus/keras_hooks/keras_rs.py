"""KerasRS's `DistributedEmbedding` under `HybridStrategy`: tables that say where they want to lie.

Outside of TPUs each of its tables is a `keras_rs.layers.EmbedReduce`, a `keras.layers.Embedding`
whose rows are summed afterwards. Reference: https://keras.io/keras_rs/api/embedding_layers/
"""

import importlib
import importlib.util

import keras

from keras_psplus.hybrid import placement
from keras_psplus.keras_hooks.patching import replace
from keras_psplus.log import logger

# What KerasRS calls the places that `HybridStrategy` knows by other names.
_MIRRORED = "default_device"


def install():
    """Installs this module's hooks, if KerasRS is there."""
    if importlib.util.find_spec("keras_rs") is None:
        return
    try:
        layer = importlib.import_module("keras_rs").layers.DistributedEmbedding
        replace(layer, "_init_feature_configs_structures", ["self", "feature_configs"])(_take_in)
        replace(layer, "_default_device_init", ["self", "feature_configs"])(_make_layers)
    except (ImportError, AttributeError) as error:
        logger.warning("keras_psplus does not fit this version of KerasRS: %s", error)


def _take_in(original, self, feature_configs):
    configs = keras.tree.flatten(feature_configs)
    tables = {id(c.table): c.table for c in configs if hasattr(c.table, "placement")}
    served = [t for t in tables.values() if t.placement == placement.PARAMETER_SERVER]
    for table in served:
        table.placement = _MIRRORED
    try:
        original(self, feature_configs)
    finally:
        for table in served:
            table.placement = placement.PARAMETER_SERVER


def _make_layers(original, self, feature_configs, *args, **kwargs):
    original(self, feature_configs, *args, **kwargs)
    for path, config in feature_configs.items():
        wish = config.table.placement
        if wish != placement.AUTO:
            layer = self._default_device_embedding_layers[path]
            layer._placement_wish = placement.MIRRORED if wish == _MIRRORED else wish
