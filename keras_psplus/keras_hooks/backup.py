"""BackupAndRestore: the chief writes the model, and all workers resume where it was written."""

import json

import tensorflow as tf
from keras.src.callbacks import backup_and_restore
from keras.src.utils import file_utils

from keras_psplus.keras_hooks import backup_files, compression_backup, updates
from keras_psplus.keras_hooks.ownership import distributing
from keras_psplus.keras_hooks.patching import replace


def install():
    """Installs this module's hooks."""
    backup = backup_and_restore.BackupAndRestore
    replace(backup, "_save_model", ["self"])(_save)
    replace(backup, "on_train_begin", ["self", "logs"])(_restore)
    replace(backup, "on_train_end", ["self", "logs"])(_end)


def _strategy_of(callback):
    return distributing(getattr(callback.model, "_distribute_strategy", None))


def _end(original, self, logs=None):
    strategy = _strategy_of(self)
    if strategy is None or strategy.is_chief:
        if strategy is not None and self.delete_checkpoint:
            backup_files.delete(self)
        return original(self, logs)
    if self.delete_checkpoint:
        compression_backup.delete(strategy, self.backup_dir)
    return None


def _save(original, self):
    strategy = _strategy_of(self)
    if strategy is None:
        return original(self)
    updates.settle(strategy, self.model)
    # First, so that there is one for every model that the chief has written.
    compression_backup.save(strategy, self.model, self.backup_dir)
    if not strategy.is_chief:
        return None
    with backup_files.written(self) as folder:
        original(self)
        # Keras leaves the states of seed generators out, and Dropout would not resume where it was.
        states = [v.numpy().tolist() for v in _seed_states(self.model)]
        with file_utils.File(_seeds_path(folder), "w") as f:
            f.write(json.dumps(states))
        compression_backup.note(strategy, self.model, folder)
    return None


def _restore(original, self, logs=None):
    strategy = _strategy_of(self)
    if strategy is None:
        return original(self, logs)
    restored, step = False, None
    if strategy.is_chief:
        backup_files.recover(self)
        step = compression_backup.noted(strategy, self.backup_dir)
        restored = file_utils.exists(self._weights_path)
        original(self, logs)
        seeds = _seeds_path(self.backup_dir)
        if restored and file_utils.exists(seeds):
            with file_utils.File(seeds, "r") as f:
                for variable, state in zip(_seed_states(self.model), json.loads(f.read())):
                    variable.assign(state)
    # Under parameter servers there is nobody else to tell.
    control = getattr(strategy.extended, "control", None)
    if control is not None:
        restored, step = _follow_chief(strategy, control, self.model, restored, step)
    if restored:
        compression_backup.restore(strategy, self.model, self.backup_dir, step)


def _follow_chief(strategy, control, model, restored, step):
    """Gives all workers what the chief has restored; returns whether it has, and the step."""
    state = {"restored": restored, "epoch": model._initial_epoch, "step": step}
    chief = json.loads(control.exchange("BackupAndRestore", json.dumps(state))[0])
    model._initial_epoch = chief["epoch"]
    if chief["restored"]:
        # Others may have no file to read: the disk need not be shared.
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        variables = [*model.variables, *updates.variables_of_optimizers(model)]
        with tf.init_scope():
            strategy.extended.broadcast([v._value for v in variables])
    return chief["restored"], chief["step"]


def _seed_states(model):
    return [v for v in model.variables if v.name == "seed_generator_state"]


def _seeds_path(folder):
    return file_utils.join(folder, "seed_generators.json")
