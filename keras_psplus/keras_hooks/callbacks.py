"""Callbacks: the chief alone writes, and all workers stop together."""

import json

from keras.src import callbacks as keras_callbacks
from keras.src.callbacks import callback_list, model_checkpoint

from keras_psplus.callbacks import CommunicationMonitor
from keras_psplus.keras_hooks import saving, updates
from keras_psplus.keras_hooks.ownership import distributing, ours
from keras_psplus.keras_hooks.patching import replace

_WRITE_ONLY = (
    keras_callbacks.CSVLogger,
    keras_callbacks.RemoteMonitor,
    keras_callbacks.TensorBoard,
)


def install():
    """Installs this module's hooks."""
    replace(callback_list.CallbackList, "set_model", ["self", "model"])(_set_model)
    replace(callback_list.CallbackList, "on_epoch_end", ["self", "epoch", "logs"])(_on_epoch_end)
    replace(model_checkpoint.ModelCheckpoint, "_save_model", ["self", "epoch", "batch", "logs"])(
        _save_checkpoint
    )


def _strategy_of(callback):
    return ours(getattr(callback.model, "_distribute_strategy", None))


def _set_model(original, self, model):
    strategy = ours(getattr(model, "_distribute_strategy", None))
    if strategy is not None and not strategy.is_chief:
        self.callbacks = [c for c in self.callbacks if not isinstance(c, _WRITE_ONLY)]
    return original(self, model)


def _on_epoch_end(original, self, epoch, logs=None):
    original(self, epoch, logs)
    strategy = _strategy_of(self)
    monitors = [c for c in self.callbacks if isinstance(c, CommunicationMonitor)]
    seconds = max((c.seconds for c in monitors if c.seconds is not None), default=None)
    all_seconds = [seconds]
    if strategy is not None and strategy.extended.control is not None:
        # A callback that stops one worker only would leave the others waiting for its gradients.
        # All workers come here, also those whose callbacks have nothing to say.
        vote = json.dumps([bool(self.model.stop_training), seconds])
        votes = [json.loads(v) for v in strategy.extended.control.exchange("epoch end", vote)]
        self.model.stop_training = any(stops for stops, _ in votes)
        all_seconds = [seconds for _, seconds in votes]
    for monitor in monitors:
        monitor.write(all_seconds)


def _save_checkpoint(original, self, epoch, batch, logs):
    strategy = _strategy_of(self)
    updates.settle(distributing(getattr(self.model, "_distribute_strategy", None)), self.model)
    if strategy is None or strategy.is_chief:
        return original(self, epoch, batch, logs)
    # It still keeps track of the best value, as on the chief.
    with saving.suppressed.raised():
        return original(self, epoch, batch, logs)
