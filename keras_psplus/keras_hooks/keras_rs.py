"""KerasRS's `DistributedEmbedding`: its tables say where they want to lie.

Outside of TPUs each of them is a `keras_rs.layers.EmbedReduce`, a `keras.layers.Embedding` whose
rows are summed afterwards. Reference: https://keras.io/keras_rs/api/embedding_layers/
"""

import importlib
import importlib.util
from typing import Any

from keras_psplus.core.base.keras_rs_placement import KerasRSPlacement
from keras_psplus.keras_hooks.hook import Hook
from keras_psplus.log import logger

_wishes = KerasRSPlacement()
_misfits: list[Exception] = []


def _of_any(_: Any) -> KerasRSPlacement:
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
