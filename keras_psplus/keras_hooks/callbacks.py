"""Callbacks: the chief alone writes, all workers stop together, and backups are of all workers."""

import keras

from keras_psplus.core.data import epochs
from keras_psplus.keras_hooks.hook import Hook, of_callback, of_model
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
        "on",
        "callbacks that only write are left out on workers that are not the chief",
        call="set_model",
        by=1,
    ),
    Hook(
        _LIST,
        "on_train_begin",
        ["self", "logs"],
        of_callback,
        "on",
        "a job resumes from its last backup",
        call="train_begin",
    ),
    Hook(
        _LIST,
        "on_epoch_begin",
        ["self", "epoch", "logs"],
        of_callback,
        "on",
        "a job resumes in the middle of an epoch",
        call="epoch_begin",
    ),
    Hook(
        _LIST,
        "on_train_batch_end",
        ["self", "batch", "logs"],
        of_callback,
        "on",
        "a process that is told to end saves the job; TerminateOnNaN hears of late losses",
        call="batch_end",
    ),
    Hook(
        _LIST,
        "on_epoch_end",
        ["self", "epoch", "logs"],
        of_callback,
        "on",
        "all workers stop if one does",
        call="epoch_end",
    ),
    Hook(
        progbar_logger.ProgbarLogger,
        "on_epoch_end",
        ["self", "epoch", "logs"],
        of_callback,
        epochs.end_progress,
        "the next epoch may have another number of steps",
    ),
    Hook(
        model_checkpoint.ModelCheckpoint,
        "_save_model",
        ["self", "epoch", "batch", "logs"],
        of_callback,
        "on",
        "the chief alone writes, once all workers have the same weights",
        call="checkpoint",
    ),
    Hook(
        _BACKUP,
        "_save_model",
        ["self"],
        of_callback,
        "on",
        "what each worker keeps is saved as well, and a kill leaves a whole state",
        call="backup",
    ),
    Hook(
        _BACKUP,
        "on_train_begin",
        ["self", "logs"],
        of_callback,
        "on",
        "all workers resume where the chief's files say, and none from damaged ones",
        call="restore",
    ),
    Hook(
        _BACKUP,
        "on_train_end",
        ["self", "logs"],
        of_callback,
        "on",
        "the chief alone deletes what all workers share",
        call="end_backup",
    ),
    *(
        Hook(
            keras.callbacks.SwapEMAWeights,
            name,
            ["self", "optimizer"],
            of_callback,
            "write",
            "workers that share weights wait for each other once, and not for each of them",
            call="change_averages",
        )
        for name in ("_tf_swap_variables", "_tf_finalize_ema_values")
    ),
)
