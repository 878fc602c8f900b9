"""Callbacks: the chief alone writes, and all workers stop and resume together."""

import json

import tensorflow as tf
from keras.src import callbacks as keras_callbacks
from keras.src.callbacks import backup_and_restore, callback_list, model_checkpoint
from keras.src.utils import file_utils

from keras_psplus.keras_hooks import saving
from keras_psplus.keras_hooks.ownership import asynchronous, ours
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
    backup = backup_and_restore.BackupAndRestore
    replace(backup, "_save_model", ["self"])(_save_backup)
    replace(backup, "on_train_begin", ["self", "logs"])(_restore_backup)
    replace(backup, "on_train_end", ["self", "logs"])(_on_chief_only)


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
    if strategy is None or strategy.extended.control is None:
        return
    # A callback that stops one worker only would leave the others waiting for its gradients.
    votes = strategy.extended.control.exchange("epoch end", str(int(self.model.stop_training)))
    self.model.stop_training = "1" in votes


def _save_checkpoint(original, self, epoch, batch, logs):
    strategy = _strategy_of(self)
    if strategy is None or strategy.is_chief:
        return original(self, epoch, batch, logs)
    # It still keeps track of the best value, as on the chief.
    with saving.suppressed():
        return original(self, epoch, batch, logs)


def _on_chief_only(original, self, logs=None):
    strategy = _strategy_of(self)
    return original(self, logs) if strategy is None or strategy.is_chief else None


def _backing_up(callback):
    strategy = getattr(callback.model, "_distribute_strategy", None)
    return ours(strategy) or asynchronous(strategy)


def _save_backup(original, self):
    strategy = _backing_up(self)
    if strategy is None:
        return original(self)
    if not strategy.is_chief:
        return None
    original(self)
    # Keras leaves the states of seed generators out, and Dropout would not resume where it was.
    states = [v.numpy().tolist() for v in _seed_states(self.model)]
    with file_utils.File(_seeds_path(self), "w") as f:
        f.write(json.dumps(states))


def _restore_backup(original, self, logs=None):
    strategy = _backing_up(self)
    if strategy is None:
        return original(self, logs)
    restored = False
    if strategy.is_chief:
        restored = file_utils.exists(self._weights_path)
        original(self, logs)
        if restored and file_utils.exists(_seeds_path(self)):
            with file_utils.File(_seeds_path(self), "r") as f:
                for variable, state in zip(_seed_states(self.model), json.loads(f.read())):
                    variable.assign(state)
    # Under parameter servers there is nobody else to tell.
    control = getattr(strategy.extended, "control", None)
    if control is None:
        return
    state = {"restored": restored, "epoch": self.model._initial_epoch}
    chief = json.loads(control.exchange("BackupAndRestore", json.dumps(state))[0])
    self.model._initial_epoch = chief["epoch"]
    if chief["restored"]:
        # Others may have no file to read: the disk need not be shared.
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        variables = self.model.variables + self.model.optimizer.variables
        with tf.init_scope():
            strategy.extended.broadcast([v._value for v in variables])


def _seed_states(model):
    return [v for v in model.variables if v.name == "seed_generator_state"]


def _seeds_path(callback):
    return file_utils.join(callback.backup_dir, "seed_generators.json")
