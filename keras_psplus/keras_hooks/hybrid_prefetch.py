"""`fit` under `HybridStrategy(prefetch=True)`: its batches come with the ones after them."""

import threading

from keras.src.backend.tensorflow import trainer

from keras_psplus.hybrid.strategy import HybridStrategy
from keras_psplus.keras_hooks.ownership import ours
from keras_psplus.keras_hooks.patching import replace
from keras_psplus.log import info_once

_local = threading.local()


def install():
    """Installs this module's hooks."""
    replace(trainer.TensorFlowTrainer, "fit", ["self", "x", "y"])(_fit)


def _fit(original, self, *args, **kwargs):
    strategy = ours(self._distribute_strategy)
    if not isinstance(strategy, HybridStrategy) or not strategy.prefetch:
        return original(self, *args, **kwargs)
    # What was read for a batch that did not come any more.
    strategy.extended.forget_ahead()
    if self.run_eagerly:
        info_once("no rows are read ahead: the model runs eagerly")
    outer, _local.awaits_data = getattr(_local, "awaits_data", False), not self.run_eagerly
    try:
        return original(self, *args, **kwargs)
    finally:
        _local.awaits_data = outer


def is_wanted():
    """Whether the data that are being shared out are to come with the next batch.

    Those of training are, the first that `fit` makes an iterator of; those of validation are not.
    """
    wanted, _local.awaits_data = getattr(_local, "awaits_data", False), False
    return wanted
