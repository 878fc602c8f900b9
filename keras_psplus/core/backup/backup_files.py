"""Atomic replacement of BackupAndRestore's files.

After a kill at any moment, the folder holds one complete state: the new one or the one before.

Keras overwrites the weights and then the epoch's number. Here both, and the other files of the
state, are first written to a temporary folder beside them; renaming that folder commits the new
state. The files are then moved to Keras's paths; a start after a kill completes that move.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.backup import backup_states, fit_calls
from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.files import integrity, ownership
from keras_psplus.files.replace import sync
from keras_psplus.keras_internals.keras_parts import file_utils, saving_lib

_WRITING, _COMPLETE, _ENDED = "writing", "complete", "ended"
# What the files have beside the numbers, in bytes.
_OVERHEAD, _OVERHEAD_OF_VARIABLE = 1 << 15, 1 << 12


@contextlib.contextmanager
def written(
    callback: keras.callbacks.BackupAndRestore, worker_files: dict[str, str], needed: int
) -> Iterator[str]:
    """Context in which Keras and the other writers write a state; commits it on exit.

    Args:
        worker_files: Dict from names to digests of the files that workers have written for it.
        needed: Bytes that this process writes at least.

    Raises:
        OSError: If it cannot be written. The state before stays.
    """
    writing = file_utils.join(callback.backup_dir, _WRITING)
    finals = callback._weights_path, callback._training_metadata_path
    try:
        with translate_file_errors(callback):
            ownership.check(callback.backup_dir)
            _make(writing)
        callback._weights_path, callback._training_metadata_path = (
            file_utils.join(writing, _name_of(path)) for path in finals
        )
        # What TensorFlow raises here is about variables of other tasks.
        with translate_file_errors(callback, (OSError,)):
            _check_room(needed, writing)
            yield writing
        with translate_file_errors(callback):
            backup_states.write_digests(writing, worker_files)
            _commit(callback)
    except OSError:
        with contextlib.suppress(OSError, tf.errors.OpError):
            _remove(writing)
        raise
    finally:
        callback._weights_path, callback._training_metadata_path = finals
    _put_in_place(callback, callback.double_checkpoint)


def translate_file_errors(
    callback: keras.callbacks.BackupAndRestore,
    errors: tuple[type[Exception], ...] = integrity.ERRORS,
) -> contextlib.AbstractContextManager[None]:
    """Says what to do about a disk that is full or that cannot be written.

    Raises:
        OSError: In place of what TensorFlow or the system raises.
    """
    return integrity.translated(
        lambda reason: (
            f"BackupAndRestore's state could not be written to {callback.backup_dir}; the one "
            "before stays, if there was one. Make room on that disk, or see to its rights, and "
            f"start the job again. Received: {reason}"
        ),
        errors,
    )


def use_previous(callback: keras.callbacks.BackupAndRestore) -> None:
    """Puts the state of `double_checkpoint` in the place of the last one, which is damaged.

    Raises:
        OSError: If it cannot be written.
    """
    writing = file_utils.join(callback.backup_dir, _WRITING)
    with translate_file_errors(callback):
        _make(writing)
        backup_states.remove_last(callback)
        backup_states.copy_previous(callback, writing)
        _commit(callback)
    _put_in_place(callback, keeps_previous=False)


def take(callback: keras.callbacks.BackupAndRestore, owner: str) -> None:
    """Makes this process the folder's owner, and completes a commit that a kill interrupted.

    Args:
        owner: Name of this process, for others.

    Raises:
        OSError: If another job's process is its owner, or it cannot be written.
    """
    with translate_file_errors(callback):
        ownership.claim(callback.backup_dir, owner, "backup_dir", fit_calls.job())
        fit_calls.take_back(callback.backup_dir)
        recover(callback)


def recover(callback: keras.callbacks.BackupAndRestore) -> None:
    """Brings to its end what a kill has cut short."""
    folder = callback.backup_dir
    if file_utils.exists(file_utils.join(folder, _ENDED)):
        _empty(folder)
        file_utils.remove(file_utils.join(folder, _ENDED))
    _put_in_place(callback, callback.double_checkpoint)
    _remove(file_utils.join(folder, _WRITING))


def check_writable(callback: keras.callbacks.BackupAndRestore) -> None:
    """Raises OSError if the folder cannot be written; before anything is trained."""
    writing = file_utils.join(callback.backup_dir, _WRITING)
    with translate_file_errors(callback):
        _make(writing)
        _remove(writing)


def delete(callback: keras.callbacks.BackupAndRestore) -> None:
    """Deletes all files and the folder, but a folder behind a symbolic link.

    Raises:
        OSError: If it cannot. What is left is no state.
    """
    folder = callback.backup_dir
    if not file_utils.exists(folder):
        return
    ended = file_utils.join(folder, _ENDED)
    with file_utils.File(ended, "w") as f:
        f.write("")
    _empty(folder)
    if file_utils.is_remote_path(folder) or not os.path.islink(folder):
        file_utils.rmtree(folder)
    else:
        file_utils.remove(ended)


def _make(folder: str) -> None:
    _remove(folder)
    file_utils.makedirs(folder)


def _commit(callback: keras.callbacks.BackupAndRestore) -> None:
    """From its renaming on, what has been written counts."""
    complete = file_utils.join(callback.backup_dir, _COMPLETE)
    _remove(complete)
    tf.io.gfile.rename(file_utils.join(callback.backup_dir, _WRITING), complete)
    sync(str(callback.backup_dir))


def bytes_of(model: keras.Model) -> int:
    """Size of what Keras writes of a model, as its variables are now."""
    variables = [v for one in (model, *optimizers_of(model).values()) for v in one.variables]
    sizes = (math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)
    return _OVERHEAD + sum(int(size) + _OVERHEAD_OF_VARIABLE for size in sizes)


def _check_room(needed: int, folder: str) -> None:
    """Raises OSError if the disk has too little free space.

    HDF5 may crash the process when it runs out of space while writing.
    """
    if file_utils.is_remote_path(folder):
        return
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed} bytes are needed, and {free} are free")


def _put_in_place(callback: keras.callbacks.BackupAndRestore, keeps_previous: bool) -> None:
    complete = file_utils.join(callback.backup_dir, _COMPLETE)
    if not file_utils.exists(complete):
        return
    for name in file_utils.listdir(complete):
        final = file_utils.join(callback.backup_dir, name)
        if keeps_previous and file_utils.exists(final):
            tf.io.gfile.rename(final, backup_states.previous_path(final), overwrite=True)
        tf.io.gfile.rename(file_utils.join(complete, name), final, overwrite=True)
    _remove(complete)


def _empty(folder: str) -> None:
    for name in file_utils.listdir(folder):
        path = file_utils.join(folder, name)
        while name != _ENDED and file_utils.exists(path):
            # Other workers delete files of theirs at the same time; what is left then is deleted
            # here, so that Keras, which does not know of them, finds none to race for.
            with contextlib.suppress(FileNotFoundError, tf.errors.NotFoundError):
                _remove(path)


def _remove(path: str) -> None:
    if file_utils.isdir(path):
        file_utils.rmtree(path)
    elif file_utils.exists(path):
        file_utils.remove(path)


def _name_of(path: str | os.PathLike[str]) -> str:
    return str(path).replace("\\", "/").rsplit("/", 1)[-1]


# Copies of weights in memory, which a thread writes to a file later.


class WeightsInMemory(saving_lib.H5IOStore):
    """A copy of a model's and its optimizers' variables, as they are now."""

    def __init__(self, model: keras.Model) -> None:
        # Not the file's constructor: there is none.
        self._entries: list[tuple[str, Any, dict[str, np.ndarray]]] = []
        self._values: dict[str, np.ndarray] = {}
        saving_lib._save_state(model, self, None, "", set())

    def write(self, path: str) -> None:
        """Writes the file that `model.save_weights` would have written."""
        store = saving_lib.H5IOStore(path, mode="w")
        try:
            for inner_path, metadata, values in self._entries:
                entry = store.make(inner_path, metadata=metadata)
                for key, value in values.items():
                    entry[key] = value
        finally:
            store.close()

    # Keras and layers call these.

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Any = None) -> WeightsInMemory:
        self._values = {}
        self._entries.append((path, metadata, self._values))
        return self

    def __setitem__(self, key: str, value: Any) -> None:
        # Copies: the next step may write to the variable's memory.
        is_variable = isinstance(value, keras.Variable)
        self._values[key] = value.numpy() if is_variable else np.array(value)

    def __getitem__(self, key: str) -> np.ndarray:
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def keys(self) -> Any:
        return self._values.keys()
