"""Loading of the newest backup that is whole, on the chief."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keras_psplus.core.backup import backup_files, backup_states
from keras_psplus.core.backup.backup_tables import BackupTables, read_here
from keras_psplus.core.backup.training_state import TrainingState, check_model
from keras_psplus.core.base import optimizers
from keras_psplus.files.tables import full_path
from keras_psplus.keras_internals.keras_parts import file_utils
from keras_psplus.log import logger

if TYPE_CHECKING:
    import keras


def read_tables(
    tables: BackupTables,
    callback: keras.callbacks.BackupAndRestore,
    states: Sequence[dict[str, Any]],
    is_strict: bool,
) -> int:
    """Loads tables into servers, of the first state that they can read; returns its number.

    Args:
        states: States of `backup_states.find`.
        is_strict: Whether optimizers have to be the same.

    Raises:
        OSError: If there is none.
        ValueError: If a state is one of another model.
    """
    model, folder = callback.model, callback.backup_dir
    for number, state in enumerate(states):
        if state["has_training"]:
            facts = TrainingState.read(folder, state["is_previous"]).facts
            # A later call's optimizer may be another one.
            check_model(model, facts, folder, with_optimizers=is_strict)
        if (listed := state["tables"]) is None:
            break
        problem = tables.read(model, full_path(folder), listed, is_strict)
        if problem is None:
            break
        if number + 1 == len(states):
            raise backup_states.damaged(callback, [problem])
        backup_states.warn_of_previous(callback, [problem], states[number + 1])
    return number


def load_first(
    tables: BackupTables,
    callback: keras.callbacks.BackupAndRestore,
    states: Sequence[dict[str, Any]],
    training: list[TrainingState],
    is_strict: bool,
) -> int:
    """Loads the first of some states that can be loaded; returns its number.

    Args:
        tables: Tables of backups, which servers have read.
        states: States of `backup_states.find`.
        training: List to which its `TrainingState` is added, if it has one.
        is_strict: Whether optimizers have to be the same.

    Raises:
        OSError: If there is none.
    """
    number = 0
    while problem := _load(tables, callback, states[number], training, is_strict):
        number += 1
        if number == len(states):
            raise backup_states.damaged(callback, [problem])
        backup_states.warn_of_previous(callback, [problem], states[number])
        # Servers have those of the state that could not be loaded.
        number += read_tables(tables, callback, states[number:], is_strict)
    seeds = file_utils.join(callback.backup_dir, backup_states.SEEDS)
    if file_utils.exists(seeds):
        with file_utils.File(seeds, "r") as f:
            for variable, value in zip(seed_states(callback.model), json.loads(f.read())):
                variable.assign(value)
    if training:
        training[0].assign_metrics(callback.model)
        training[0].assign_others(callback.model)
    return number


def _load(
    tables: BackupTables,
    callback: keras.callbacks.BackupAndRestore,
    state: dict[str, Any],
    training: list[TrainingState],
    is_strict: bool,
) -> str | None:
    """Loads the model's weights from a backup; returns an error text, or None."""
    model = callback.model
    if state["is_previous"]:
        backup_files.use_previous(callback)
    training[:] = [TrainingState.read(callback.backup_dir)] if state["has_training"] else []
    try:
        with tables.set_aside(model, state["tables"]) as here:
            callback._load_model()
    except (OSError, KeyError, RuntimeError) as error:
        if state["has_digests"]:
            # It is as it was written: something else is wrong.
            raise
        return f"{callback._weights_path} cannot be read: {error}"
    problem = read_here(callback.backup_dir, here, is_strict)
    if problem is not None:
        return problem
    steps = optimizers.steps_of(model)
    if training and not state["has_digests"] and training[0].facts.get("steps") != steps:
        # Another program has written the weights since.
        logger.warning(
            "%s in %s is of other weights than those there, so that training begins at the first "
            "batch of epoch %d. Received: weights that have made %d steps",
            backup_states.TRAINING,
            callback.backup_dir,
            state["epoch"] + 1,
            steps,
        )
        training.clear()
    return backup_states.check_epoch(callback, state, steps)


def seed_states(model: keras.Model) -> list[keras.Variable]:
    return [v for v in model.variables if v.name == "seed_generator_state"]
