"""Callbacks: the chief alone writes, all workers stop together, and backups are of all workers."""

from keras_psplus.keras_hooks.finders import of_callback, of_model
from keras_psplus.keras_hooks.hook import Hook
from keras_psplus.keras_internals.keras_parts import (
    backup_and_restore,
    callback_list,
    model_checkpoint,
    progbar_logger,
)

_BACKUP = backup_and_restore.BackupAndRestore
_LIST = callback_list.CallbackList

HOOKS = (
    Hook(
        _LIST,
        "set_model",
        ["self", "model"],
        of_model,
        "set_callbacks_model",
        "callbacks that only write are left out on workers that are not the chief",
        by=1,
    ),
    Hook(
        _LIST,
        "on_train_begin",
        ["self", "logs"],
        of_callback,
        "begin_training",
        "a job resumes from its last backup",
    ),
    Hook(
        _LIST,
        "on_epoch_begin",
        ["self", "epoch", "logs"],
        of_callback,
        "begin_epoch",
        "a job resumes in the middle of an epoch",
    ),
    Hook(
        _LIST,
        "on_train_batch_end",
        ["self", "batch", "logs"],
        of_callback,
        "end_batch",
        "a process that is told to end saves the job; TerminateOnNaN hears of late losses",
    ),
    Hook(
        _LIST,
        "on_epoch_end",
        ["self", "epoch", "logs"],
        of_callback,
        "end_epoch",
        "all workers stop if one does",
    ),
    Hook(
        progbar_logger.ProgbarLogger,
        "on_epoch_end",
        ["self", "epoch", "logs"],
        of_callback,
        "end_progress",
        "the next epoch may have another number of steps",
    ),
    Hook(
        model_checkpoint.ModelCheckpoint,
        "_save_model",
        ["self", "epoch", "batch", "logs"],
        of_callback,
        "save_checkpoint",
        "the chief alone writes, once all workers have the same weights",
    ),
    Hook(
        _BACKUP,
        "_save_model",
        ["self"],
        of_callback,
        "save_backup",
        "what each worker keeps is saved as well, and a kill leaves a whole state",
    ),
    Hook(
        _BACKUP,
        "on_train_begin",
        ["self", "logs"],
        of_callback,
        "restore_backup",
        "all workers resume where the chief's files say, and none from damaged ones",
    ),
    Hook(
        _BACKUP,
        "on_train_end",
        ["self", "logs"],
        of_callback,
        "end_backup",
        "the chief alone deletes what all workers share",
    ),
)
