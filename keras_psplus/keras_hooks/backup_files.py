"""BackupAndRestore's files: all of one state, or all of the one before, whenever a kill comes.

Keras overwrites weights and then the number of the epoch. Here both, and what else belongs to them,
are written to a folder beside; its renaming is the moment from which the new state counts. Then the
files are moved to where Keras has them, which a start after a kill does to its end.
"""

import contextlib
import errno
import math
import shutil

import tensorflow as tf
from keras.src.utils import file_utils

from keras_psplus.keras_hooks.updates import optimizers_of

_WRITING, _COMPLETE, _ENDED = "writing", "complete", "ended"
# What the files have beside the numbers, in bytes.
_LITTLE, _OF_VARIABLE = 1 << 15, 1 << 12


@contextlib.contextmanager
def written(callback):
    """Context in which Keras, and whoever gets the folder, write a state; then it counts.

    Args:
        callback: The `BackupAndRestore`.

    Raises:
        OSError: If it cannot be written. The state before stays.
    """
    writing = file_utils.join(callback.backup_dir, _WRITING)
    finals = callback._weights_path, callback._training_metadata_path
    try:
        _remove(writing)
        file_utils.makedirs(writing)
        _check_room(callback.model, writing)
        callback._weights_path, callback._training_metadata_path = (
            file_utils.join(writing, _name_of(path)) for path in finals
        )
        yield writing
    except OSError as error:
        with contextlib.suppress(OSError):
            _remove(writing)
        raise OSError(
            f"BackupAndRestore's state could not be written to {callback.backup_dir}; the one "
            "before stays, if there was one. Make room on that disk, or see to its rights, and "
            f"start the job again. Received: {error}"
        ) from error
    finally:
        callback._weights_path, callback._training_metadata_path = finals
    complete = file_utils.join(callback.backup_dir, _COMPLETE)
    _remove(complete)
    tf.io.gfile.rename(writing, complete)
    _put_in_place(callback)


def recover(callback):
    """Brings to its end what a kill has cut short."""
    folder = callback.backup_dir
    if file_utils.exists(file_utils.join(folder, _ENDED)):
        _empty(folder)
        file_utils.remove(file_utils.join(folder, _ENDED))
    _put_in_place(callback)
    _remove(file_utils.join(folder, _WRITING))


def delete(callback):
    """Deletes all files but a note that this is going on; Keras deletes that with the folder."""
    if file_utils.exists(callback.backup_dir):
        with file_utils.File(file_utils.join(callback.backup_dir, _ENDED), "w") as f:
            f.write("")
        _empty(callback.backup_dir)


def _check_room(model, folder):
    """Raises OSError if a disk has no room: HDF5 may crash the process when it finds that out."""
    if file_utils.is_remote_path(folder):
        return
    variables = [v for one in (model, *optimizers_of(model).values()) for v in one.variables]
    needed = _LITTLE + sum(
        math.prod(v.shape) * tf.as_dtype(v.dtype).size + _OF_VARIABLE for v in variables
    )
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed} bytes are needed, and {free} are free")


def _put_in_place(callback):
    complete = file_utils.join(callback.backup_dir, _COMPLETE)
    if not file_utils.exists(complete):
        return
    previous = {
        _name_of(callback._weights_path): callback._prev_weights_path,
        _name_of(callback._training_metadata_path): callback._prev_training_metadata_path,
    }
    for name in file_utils.listdir(complete):
        final = file_utils.join(callback.backup_dir, name)
        if callback.double_checkpoint and name in previous and file_utils.exists(final):
            tf.io.gfile.rename(final, previous[name], overwrite=True)
        tf.io.gfile.rename(file_utils.join(complete, name), final, overwrite=True)
    _remove(complete)


def _empty(folder):
    for name in file_utils.listdir(folder):
        # Other workers delete files of theirs at the same time.
        with contextlib.suppress(FileNotFoundError):
            if name != _ENDED:
                _remove(file_utils.join(folder, name))


def _remove(path):
    if file_utils.isdir(path):
        file_utils.rmtree(path)
    elif file_utils.exists(path):
        file_utils.remove(path)


def _name_of(path):
    return str(path).replace("\\", "/").rsplit("/", 1)[-1]
