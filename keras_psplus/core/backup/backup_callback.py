"""BackupAndRestore: the chief writes the model, and all workers resume where it was written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.core.backup import fit_progress, store
from keras_psplus.core.backup.backup_tables import BackupTables, read_here, without_rows
from keras_psplus.core.backup.store import Backup, WeightsInMemory
from keras_psplus.core.backup.training_state import (
    Resumed,
    TrainingState,
    build_optimizers,
    check_model,
    weights_of_callbacks,
)
from keras_psplus.core.base import optimizers
from keras_psplus.core.jobs.control import run_on_chief
from keras_psplus.errors import TableServerError
from keras_psplus.files.tables import full_path, write_list
from keras_psplus.keras_internals.keras_parts import file_utils
from keras_psplus.log import logger

if TYPE_CHECKING:
    import keras

    from keras_psplus.core.jobs.control import ControlPlane
    from keras_psplus.core.strategy_engine import StrategyEngine

_WHAT = "BackupAndRestore"
_SAID = {
    fit_progress.PASS: (
        logger.info,
        "call %d of `fit` with the backup %s is passed over: it had ended before the backup was "
        "made, in call %d, whose weights the model has now",
    ),
    fit_progress.AGAIN: (
        logger.warning,
        "call %d of `fit` is trained again, and not backed up: the backup in %s is one of another "
        "model, of call %d. Give each call its own `backup_dir`",
    ),
    fit_progress.FRESH: (
        logger.info,
        "call %d of `fit` begins afresh: the backup in %s is of call %d, which has ended",
    ),
}


def end(engine: StrategyEngine, callback: keras.callbacks.BackupAndRestore) -> None:
    """Deletes what `fit` no longer needs, if the callback is to.

    The training has ended: nothing that fails from here on may have it done again.
    """
    progress, deletes = engine.progress, callback.delete_checkpoint
    if progress.call is not None:
        history = callback.model.history
        found = json.loads(json.dumps([history.epoch, history.history], default=float))
        progress.call.has_ended, progress.call.history = True, found
    if not progress.is_saving:
        return
    folder = os.fspath(callback.backup_dir)
    if not engine.strategy.is_chief:
        # On a disk that is shared, the chief deletes everything, when it no longer counts.
        if deletes and not store.has_any(folder):
            engine.worker_files.delete(folder)
        return
    if not deletes:
        engine.backup_writer.finish()
        return
    try:
        engine.backup_writer.finish()
        # Before what servers have: a state without its tables would be taken for a damaged one.
        is_kept = store.end(folder)
        engine.backup_tables.note_ended(full_path(folder), is_kept)
    except (OSError, TableServerError, tf.errors.OpError) as error:
        logger.warning(
            "the training has ended, but its backup could not be deleted: delete it, or a start of "
            "the same script will resume from it. Received: %s",
            error,
        )


def save(engine: StrategyEngine, callback: keras.callbacks.BackupAndRestore) -> None:
    """Writes the model, its training and what each worker keeps, as one backup.

    1. Every worker writes what it keeps, and all of them wait until all have.
    2. Servers begin to write their tables as they are now, and workers go on.
    3. The chief waits for them, writes the rest, and has LATEST name it: from then on the new
       backup counts.

    Between the ends of epochs, where weights are in this process, a thread does the third.
    """
    model, tables, listed = callback.model, engine.backup_tables, None
    folder = os.fspath(callback.backup_dir)
    of_all = full_path(folder)
    if not engine.progress.is_saving or (engine.progress.batch and model.stop_training):
        # Resumed in the middle of this epoch, it would not stop there.
        return
    on_servers, is_chief = tables.any_of(model), engine.strategy.is_chief
    if on_servers:
        # A failed write of a server ends all workers.
        run_on_chief(engine.control, is_chief, _WHAT, engine.backup_writer.finish)
    else:
        engine.backup_writer.finish()
    engine.settle(model)
    with store.translate_file_errors(folder, (OSError,)):
        worker_files = engine.worker_files.save(
            model,
            folder,
            _WHAT,
            lambda: store.worker_files_in_use(folder),
            # A process that is here has sent all that belongs to this step.
            waits=on_servers,
        )
    is_remote = file_utils.is_remote_path(folder)
    goes_on = callback.save_freq != "epoch" and not is_remote and engine.has_weights_in_memory

    def write_tables() -> dict[str, Any] | None:
        begun = tables.begin_write(model, of_all)
        return begun if begun is None or goes_on else finish(begun)

    def finish(begun: dict[str, Any]) -> dict[str, Any] | None:
        return tables.finish_write(of_all, begun, store.stems_in_use(folder))

    if on_servers:
        listed = run_on_chief(engine.control, is_chief, _WHAT, write_tables)
        if listed is None:
            return
    if worker_files is None or not is_chief:
        return
    texts = {
        store.METADATA: {"epoch": callback._current_epoch, "batch": callback._last_batch_seen},
        # Keras leaves these states out, and Dropout would not resume where it was.
        store.SEEDS: [v.numpy().tolist() for v in seed_states(model)],
    }
    training, at = _training(engine, callback), engine.progress.at
    parts = tables.parts_on_servers(model)
    with without_rows(parts):
        needed = store.bytes_of(model)

    def write(write_weights: Callable[[str], Any]) -> None:
        done = finish(listed) if listed is not None and goes_on else listed
        if listed is not None and done is None:
            return
        keeps_previous = callback.double_checkpoint
        with store.written(folder, worker_files, needed, keeps_previous) as path:
            write_weights(file_utils.join(path, store.WEIGHTS))
            for name, content in texts.items():
                store.write_text(file_utils.join(path, name), json.dumps(content))
            if training is not None:
                training.write(path)
            if done is not None:
                write_list(path, done)
        if done is not None:
            tables.note_written(of_all, done, at)

    with without_rows(parts):
        if not goes_on:
            write(model.save_weights)
            return
        weights = WeightsInMemory(model)
    engine.backup_writer.start(lambda: write(weights.write))


def _training(
    engine: StrategyEngine, callback: keras.callbacks.BackupAndRestore
) -> TrainingState | None:
    iterator = engine.progress.iterator
    of_data = None if iterator is None else engine.data_position(iterator)
    return engine.progress.state(
        callback.model,
        of_data,
        os.fspath(callback.backup_dir),
        lambda variable: not engine.backup_tables.is_on_servers(variable),
    )


def restore(
    engine: StrategyEngine,
    original: Callable[..., Any],
    callback: keras.callbacks.BackupAndRestore,
    logs: dict[str, Any] | None = None,
) -> Any:
    """Brings all workers to the newest whole state; without variables to restore, as Keras does."""
    model, folder = callback.model, os.fspath(callback.backup_dir)
    if not model.built:
        return original(callback, logs)
    is_chief, control, files = engine.strategy.is_chief, engine.control, engine.worker_files
    engine.backup_writer.finish()

    def find() -> tuple[list[Backup], dict[str, Any]]:
        store.take(folder, engine.progress.owner)
        backups = store.find(folder)
        engine.backup_tables.check_writable(model, full_path(folder))
        return backups, _found(engine, callback, backups)

    backups, found = run_on_chief(control, is_chief, _WHAT, find)
    if not backups or found["what"] == fit_progress.FRESH:
        return None
    if found["what"] == fit_progress.AGAIN:
        engine.progress.is_saving = False
        return None
    problems = files.problems(folder, [one["worker_files"] for one in backups])
    # An older one that is whole is better than a newer one without what workers have kept.
    first = next((i for i, problem in enumerate(problems) if not problem), 0)
    if first and is_chief:
        store.warn_of_previous(folder, problems[0], backups[first])
    # On all workers at once: they agree on each variable that is made.
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    build_optimizers(engine.strategy, model, found)
    engine.place(model)
    is_strict = found["what"] != fit_progress.PASS
    first += run_on_chief(
        control,
        is_chief,
        _WHAT,
        lambda: read_tables(engine.backup_tables, callback, backups[first:], is_strict),
    )
    training: list[TrainingState] = []

    def load() -> tuple[int, dict[str, Any] | None]:
        number = load_first(engine.backup_tables, callback, backups[first:], training, is_strict)
        store.use(folder, backups[first + number])
        return number, training[0].facts if training else None

    number, facts = _on_main_thread(control, is_chief, load)
    chosen = backups[first + number]
    of_callbacks: dict[str, Any] = {}
    if facts is not None:
        state = training[0] if is_chief else None
        of_callbacks = weights_of_callbacks(
            *(model, facts, state, engine.broadcast_restored),
            lambda: control and control.exchange("weights that callbacks keep", ""),
        )
    others = optimizers.other_variables(model).values()
    of_optimizers = optimizers.variables_of_optimizers(model)
    engine.broadcast_restored([*model.variables, *model.metrics_variables, *of_optimizers, *others])
    if found["what"] == fit_progress.PASS:
        engine.progress.pass_over(model, found)
        return None
    model._initial_epoch = callback._current_epoch = chosen["epoch"]
    if facts is not None:
        engine.progress.resume(Resumed(model, facts, of_callbacks))
        model._initial_epoch = facts["epoch"]
        if is_chief and facts["batch"]:
            logger.info(
                "training goes on after batch %d of epoch %d", facts["batch"], facts["epoch"] + 1
            )
    files.restore(model, folder, chosen["worker_files"], problems[first + number])
    return None


def _found(
    engine: StrategyEngine, callback: keras.callbacks.BackupAndRestore, backups: list[Backup]
) -> dict[str, Any]:
    """Decides, on the chief, how this call of `fit` uses the newest backup; logs it.

    Returns:
        Dict: `what` is to be done, and a call's `history` and `random`, if it is passed over.
    """
    call = engine.progress.call
    if not backups or not backups[0]["has_training"]:
        return {"what": fit_progress.RESUME, "optimizers": {}}
    facts = TrainingState.read(backups[0]["path"]).facts
    described = facts["optimizers"]
    if call is None:
        return {"what": fit_progress.RESUME, "optimizers": described}
    what = fit_progress.calls_of_folder(callback.backup_dir).decide(call, facts)
    if what == fit_progress.FRESH:
        # The next save replaces it: it has to be one of this script's.
        check_model(callback.model, facts, callback.backup_dir, with_optimizers=False)
    if what in _SAID:
        log, text = _SAID[what]
        log(text, call.number, callback.backup_dir, len(facts["calls"]))
    history = None
    if what == fit_progress.PASS:
        history = facts["calls"][call.number - 1]["history"]
    return {
        "what": what,
        "optimizers": {} if what == fit_progress.PASS else described,
        "history": history,
        "random": facts["random"],
    }


def _on_main_thread(control: ControlPlane | None, is_chief: bool, work: Callable[[], Any]) -> Any:
    """As `run_on_chief`, for what has to be done in the thread that trains."""
    if not is_chief or control is None:
        return run_on_chief(control, is_chief, _WHAT, work)
    try:
        result = work()
    except Exception as error:
        said = {"error": f"{error}", "kind": type(error).__name__}
        control.exchange(_WHAT, json.dumps(said))
        raise
    return json.loads(control.exchange(_WHAT, json.dumps({"result": result}))[0])["result"]


# Loading of the newest backup that is whole, on the chief.


def read_tables(
    tables: BackupTables,
    callback: keras.callbacks.BackupAndRestore,
    backups: Sequence[Backup],
    is_strict: bool,
) -> int:
    """Loads tables into servers, of the first backup that they can read; returns its number.

    Args:
        is_strict: Whether optimizers have to be the same.

    Raises:
        OSError: If there is none.
        ValueError: If a backup is one of another model.
    """
    model, folder = callback.model, os.fspath(callback.backup_dir)
    for number, backup in enumerate(backups):
        if backup["has_training"]:
            facts = TrainingState.read(backup["path"]).facts
            # A later call's optimizer may be another one.
            check_model(model, facts, folder, with_optimizers=is_strict)
        if (listed := backup["tables"]) is None:
            break
        problem = tables.read(model, full_path(folder), listed, is_strict)
        if problem is None:
            break
        if number + 1 == len(backups):
            raise store.damaged(folder, [problem])
        store.warn_of_previous(folder, [problem], backups[number + 1])
    return number


def load_first(
    tables: BackupTables,
    callback: keras.callbacks.BackupAndRestore,
    backups: Sequence[Backup],
    training: list[TrainingState],
    is_strict: bool,
) -> int:
    """Loads the first of some backups that can be loaded; returns its number.

    Args:
        tables: Tables of backups, which servers have read.
        training: List to which its `TrainingState` is added, if it has one.

    Raises:
        OSError: If there is none.
    """
    number, model, folder = 0, callback.model, os.fspath(callback.backup_dir)
    while problem := _load(tables, model, folder, backups[number], is_strict):
        number += 1
        if number == len(backups):
            raise store.damaged(folder, [problem])
        store.warn_of_previous(folder, [problem], backups[number])
        # Servers have those of the backup that could not be loaded.
        number += read_tables(tables, callback, backups[number:], is_strict)
    path = backups[number]["path"]
    if backups[number]["has_manifest"]:
        with file_utils.File(file_utils.join(path, store.SEEDS), "r") as f:
            for variable, value in zip(seed_states(model), json.loads(f.read())):
                variable.assign(value)
    if backups[number]["has_training"]:
        training.append(TrainingState.read(path))
        training[0].assign_metrics(model)
        training[0].assign_others(model)
    return number


def _load(
    tables: BackupTables, model: keras.Model, folder: str, backup: Backup, is_strict: bool
) -> str | None:
    """Loads the model's weights from a backup; returns an error text, or None."""
    weights = file_utils.join(backup["path"], store.WEIGHTS)
    try:
        with tables.set_aside(model, backup["tables"]) as here:
            model.load_weights(weights)
    except (OSError, KeyError, RuntimeError) as error:
        if backup["has_manifest"]:
            # It is as it was written: something else is wrong.
            raise
        return f"{weights} cannot be read: {error}"
    return read_here(folder, backup["tables"], here, is_strict)


def seed_states(model: keras.Model) -> list[keras.Variable]:
    return [v for v in model.variables if v.name == "seed_generator_state"]
