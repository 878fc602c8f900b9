"""BackupAndRestore: the chief writes the model, and all workers resume where it was written."""

import json

import tensorflow as tf
from keras.src.callbacks import backup_and_restore
from keras.src.utils import file_utils

from keras_psplus.hybrid.on_chief import on_chief
from keras_psplus.keras_hooks import (
    backup_files,
    backup_states,
    compression_backup,
    earlier_backups,
    updates,
)
from keras_psplus.keras_hooks.ownership import of_this_library
from keras_psplus.keras_hooks.patching import replace

_WHAT = "BackupAndRestore"


def install():
    """Installs this module's hooks."""
    backup = backup_and_restore.BackupAndRestore
    replace(backup, "_save_model", ["self"])(_save)
    replace(backup, "on_train_begin", ["self", "logs"])(_restore)
    replace(backup, "on_train_end", ["self", "logs"])(_end)


def _strategy_of(callback):
    return of_this_library(getattr(callback.model, "_distribute_strategy", None))


def _end(original, self, logs=None):
    strategy = _strategy_of(self)
    if strategy is None or strategy.is_chief:
        if strategy is not None and self.delete_checkpoint:
            backup_files.delete(self)
        return original(self, logs)
    # On a disk that is shared, the chief deletes everything, when it no longer counts.
    if self.delete_checkpoint and not file_utils.exists(self._weights_path):
        compression_backup.delete(strategy, self.backup_dir)
    return None


def _save(original, self):
    strategy = _strategy_of(self)
    if strategy is None:
        return original(self)
    updates.settle(strategy, self.model)
    with backup_files.explained(self, OSError):
        worker_files = compression_backup.save(
            strategy,
            self.model,
            self.backup_dir,
            _WHAT,
            lambda: backup_states.worker_files_in_use(self),
        )
    if worker_files is None or not strategy.is_chief:
        return None
    with backup_files.written(self, worker_files) as folder:
        original(self)
        # Keras leaves the states of seed generators out, and Dropout would not resume where it was.
        states = [v.numpy().tolist() for v in _seed_states(self.model)]
        with file_utils.File(file_utils.join(folder, backup_states.SEEDS), "w") as f:
            f.write(json.dumps(states))
    return None


def _restore(original, self, logs=None):
    strategy = _strategy_of(self)
    if strategy is None or not self.model.built:
        return original(self, logs)
    # Under parameter servers there is nobody else to tell.
    control = getattr(strategy.extended, "control", None)

    def find():
        backup_files.recover(self)
        return backup_states.find(self)

    states = on_chief(control, strategy.is_chief, _WHAT, find)
    if not states:
        return None
    problems = compression_backup.problems(
        strategy, self.backup_dir, [state["worker_files"] for state in states]
    )
    # An older one that is whole is better than a newer one without what workers have kept.
    first = next((i for i, problem in enumerate(problems) if not problem), 0)
    if first and strategy.is_chief:
        backup_states.warn_of_previous(self, problems[0], states[first])

    def load():
        return _load_first(self, strategy, states[first:])

    number, position = _on_main_thread(control, strategy.is_chief, load)
    chosen = states[first + number]
    self.model._initial_epoch = self._current_epoch = chosen["epoch"]
    if control is not None:
        _broadcast(strategy, self.model)
    if chosen["worker_files"] is None:
        earlier_backups.restore(strategy, self.model, self.backup_dir, position)
        return None
    compression_backup.restore(
        strategy, self.model, self.backup_dir, chosen["worker_files"], problems[first + number]
    )
    return None


def _load_first(callback, strategy, states):
    """Loads the first of some states that can be loaded; returns its number and its position."""
    for number, state in enumerate(states):
        problem = _load(callback, state)
        if problem is None:
            break
        if number + 1 == len(states):
            raise backup_states.damaged(callback, [problem])
        backup_states.warn_of_previous(callback, [problem], states[number + 1])
    seeds = file_utils.join(callback.backup_dir, backup_states.SEEDS)
    if file_utils.exists(seeds):
        with file_utils.File(seeds, "r") as f:
            for variable, value in zip(_seed_states(callback.model), json.loads(f.read())):
                variable.assign(value)
    return number, earlier_backups.position(strategy, callback.backup_dir)


def _load(callback, state):
    """Gives the model the weights of a state; returns what is wrong with it, or None."""
    model = callback.model
    if state["is_previous"]:
        backup_files.use_previous(callback)
    try:
        callback._load_model()
    except (OSError, KeyError, RuntimeError) as error:
        if state["has_digests"]:
            # It is as it was written: something else is wrong.
            raise
        return f"{callback._weights_path} cannot be read: {error}"
    steps = [int(one.iterations.numpy()) for one in updates.optimizers_of(model).values()]
    return backup_states.check_epoch(callback, state, sum(steps))


def _on_main_thread(control, is_chief, work):
    """As `on_chief`, for what has to be done in the thread that trains."""
    if not is_chief or control is None:
        return on_chief(control, is_chief, _WHAT, work)
    try:
        result = work()
    except Exception as error:
        said = {"error": f"{error}", "kind": type(error).__name__}
        control.exchange(_WHAT, json.dumps(said))
        raise
    return json.loads(control.exchange(_WHAT, json.dumps({"result": result}))[0])["result"]


def _broadcast(strategy, model):
    """Gives all workers what the chief has read: the disk need not be shared."""
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *updates.variables_of_optimizers(model)]
    with tf.init_scope():
        strategy.extended.broadcast([v._value for v in variables])


def _seed_states(model):
    return [v for v in model.variables if v.name == "seed_generator_state"]
