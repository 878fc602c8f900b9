"""KerasRS's `DistributedEmbedding`: its tables say where they want to lie, or are dynamic ones.

Outside of TPUs each of them is a `keras_rs.layers.EmbedReduce`, a `keras.layers.Embedding` whose
rows are summed afterwards. Reference: https://keras.io/keras_rs/api/embedding_layers/
"""

import importlib
import importlib.util
from typing import Any

import keras

from keras_psplus.core.base.checks import KerasRSPlacement
from keras_psplus.engine import Call
from keras_psplus.keras_hooks.hook import Hook
from keras_psplus.layers.dynamic_embedding import DynamicEmbedding, FeatureLookup
from keras_psplus.log import logger


class KerasRSTables(KerasRSPlacement):
    """Tables of features that are dynamic ones, beside those of a fixed size.

    A `DynamicEmbedding` in the place of a table becomes the initializer of one: KerasRS writes it
    to a model's configuration so, and makes it again.
    """

    def take_in(self, call: Call) -> None:
        for config in keras.tree.flatten(call.get("feature_configs")):
            if isinstance(config.table, DynamicEmbedding):
                config.table = self._config_of(config.table)
        super().take_in(call)

    def make_layers(self, call: Call) -> None:
        configs, dynamic = dict(call.get("feature_configs")), {}
        for path, config in call.get("feature_configs").items():
            if isinstance(config.table.initializer, DynamicEmbedding):
                dynamic[path] = configs.pop(path).table.initializer
        super().make_layers(call.changed(feature_configs=configs))
        layers = {id(table): FeatureLookup(table) for table in dynamic.values()}
        for path, table in dynamic.items():
            call.owner._default_device_embedding_layers[path] = layers[id(table)]

    def _config_of(self, table: DynamicEmbedding) -> Any:
        if table.combiner is None:
            raise ValueError(
                "KerasRS combines the rows of each example, by the `combiner` of the table. Give "
                'it to the DynamicEmbedding, as DynamicEmbedding(32, combiner="mean"). '
                f"Received: combiner=None of the table '{table.name}'"
            )
        # Features that share a table share its configuration.
        if table.keras_rs_config is None:
            make = importlib.import_module("keras_rs").layers.TableConfig
            # Of no fixed number of rows.
            table.keras_rs_config = make(table.name, 0, table.dim, table, placement=_HERE)
        return table.keras_rs_config


_HERE = "default_device"
_wishes = KerasRSTables()
_misfits: list[Exception] = []


def _of_any(_: Any) -> KerasRSTables:
    # Also before there is a strategy: the scope in which the layer is built decides.
    return _wishes


def hooks() -> tuple[Hook, ...]:
    """The hooks into KerasRS, if it is there; else none."""
    if importlib.util.find_spec("keras_rs") is None:
        return ()
    try:
        layer = importlib.import_module("keras_rs").layers.DistributedEmbedding
    except (ImportError, AttributeError) as error:
        _misfits.append(error)
        return ()
    found = (
        Hook(
            layer,
            "_init_feature_configs_structures",
            ["self", "feature_configs"],
            _of_any,
            "take_in",
            "KerasRS refuses the placement `parameter_server`",
        ),
        Hook(
            layer,
            "_default_device_init",
            ["self", "feature_configs"],
            _of_any,
            "make_layers",
            "the embedding of a table learns where the table wants to lie",
        ),
    )
    try:
        for hook in found:
            hook.check_signature()
    except ImportError as error:
        _misfits.append(error)
        return ()
    return found


def warn_of_misfit() -> None:
    """Warns of a KerasRS that has other functions, and is left as it is."""
    for error in _misfits:
        logger.warning("keras_psplus does not fit this version of KerasRS: %s", error)
