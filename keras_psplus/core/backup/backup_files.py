"""The states in BackupAndRestore's folder, and whether each of them is whole.

A state is the weights, the epoch and what else belongs to them. `digests.json`, which is written
with them, has the SHA-256 of each file, and those of the files that workers have written for the
same step. States of Keras itself, and those whose digests were deleted, are checked by what they
say, and have no workers' files.
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.core.backup import fit_calls
from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.files import integrity, ownership
from keras_psplus.files.replace import sync
from keras_psplus.files.tables import LIST, read_list, stems_of
from keras_psplus.keras_internals.keras_parts import file_utils, saving_lib
from keras_psplus.log import logger

SEEDS = "seed_generators.json"
TRAINING = "training_state.npz"
_DIGESTS = "digests.json"
_FORMAT = 1
# Keras's suffix of the state before, with `double_checkpoint`.
_PREVIOUS = ".bkp"


def write_digests(folder: str, worker_files: dict[str, str]) -> None:
    """Writes the digests of a folder's files.

    Args:
        worker_files: Dict from names to digests of the files that workers have written for it.
    """
    files = {
        name: integrity.digest_of_file(file_utils.join(folder, name)) for name in _names(folder)
    }
    content = {"format": _FORMAT, "files": files, "worker_files": worker_files}
    with file_utils.File(file_utils.join(folder, _DIGESTS), "w") as file:
        file.write(integrity.to_json(content, indent=1))
    # Before it counts, also if the power fails.
    for name in (*files, _DIGESTS):
        sync(file_utils.join(folder, name))


def find(callback: keras.callbacks.BackupAndRestore) -> list[dict[str, Any]]:
    """The whole states in a callback's folder, the newest first.

    Returns:
        List of dicts: `is_previous`, whether it is the one of `double_checkpoint`; `epoch`;
        `worker_files`, names and digests of workers' files; `has_digests`; `has_training`,
        whether it says where in an epoch it was; and `tables`, the list of tables that servers
        have written, or None.

    Raises:
        OSError: If there are states, but no whole one.
    """
    found, problems = [], []
    for suffix in ("", _PREVIOUS):
        if any(file_utils.exists(path) for path in _paths(callback, suffix)):
            state, problem = _read(callback, suffix)
            if state is None:
                problems.append(problem)
                continue
            found.append(state)
            if state["has_digests"] and not state["worker_files"] and state["tables"] is None:
                # Nothing can be wrong with it any more: the one before need not be read.
                break
    if problems and not found:
        raise damaged(callback, problems)
    if found and found[0]["is_previous"]:
        warn_of_previous(callback, problems or ["the newer one is gone"], found[0])
    return found


def damaged(callback: keras.callbacks.BackupAndRestore, problems: Iterable[str]) -> OSError:
    """The error for a folder that has no whole state."""
    return OSError(
        f"BackupAndRestore's state in {callback.backup_dir} is damaged or incomplete, and there is "
        "no older whole one. Put that file back from a copy, or delete the folder to train from "
        f"the beginning; if another program or version has written it since, delete {_DIGESTS} "
        f"to have the files taken as they are. Received: {'; '.join(problems)}"
    )


def warn_of_previous(
    callback: keras.callbacks.BackupAndRestore, problems: Iterable[str], state: dict[str, Any]
) -> None:
    """Says that training resumes from an older state than the last."""
    logger.warning(
        "the last state of BackupAndRestore in %s is damaged or incomplete; training resumes from "
        "the one before, at epoch %d. Received: %s",
        callback.backup_dir,
        state["epoch"] + 1,
        "; ".join(problems),
    )


def check_epoch(
    callback: keras.callbacks.BackupAndRestore, state: dict[str, Any], steps: int
) -> str | None:
    """Sees that the epoch of a state without digests can be.

    Args:
        state: One of `find`.
        steps: How many steps the optimizers of its weights have made.

    Returns:
        What is wrong, or None.
    """
    epochs = (callback.params or {}).get("epochs")
    if state["has_digests"] or epochs is None or state["epoch"] <= max(epochs, steps):
        return None
    path = _paths(callback, _PREVIOUS if state["is_previous"] else "")[1]
    return f"{path} has the epoch {state['epoch']}, and its weights have made {steps} steps"


def worker_files_in_use(callback: keras.callbacks.BackupAndRestore) -> list[str] | None:
    """Names of the workers' files that the folder's states need.

    None if that is not known.
    """
    names = set()
    for suffix in ("", _PREVIOUS):
        *_, listed = _paths(callback, suffix)
        if file_utils.exists(listed):
            try:
                names.update(_listed(listed)["worker_files"])
            except (ValueError, OSError, tf.errors.OpError, KeyError):
                return None
    return sorted(names)


def stems_in_use(callback: keras.callbacks.BackupAndRestore) -> list[str] | None:
    """Beginnings of the names of servers' files that the folder's states need.

    None if that is not known.
    """
    try:
        lists = [_tables(callback, suffix) for suffix in ("", _PREVIOUS)]
    except (ValueError, OSError, tf.errors.OpError):
        return None
    return [stem for listed in lists if listed is not None for stem in stems_of(listed)]


def remove_last(callback: keras.callbacks.BackupAndRestore) -> None:
    """Removes the files of the last state, which is damaged."""
    # In this order, so that what is left is never taken for a state without digests.
    others = (file_utils.join(callback.backup_dir, name) for name in (SEEDS, TRAINING, LIST))
    for path in (*_paths(callback, ""), *others):
        if file_utils.exists(path):
            file_utils.remove(path)


def copy_previous(callback: keras.callbacks.BackupAndRestore, folder: str) -> None:
    """Copies the previous state's files to a folder, under the current state's names."""
    for name in file_utils.listdir(callback.backup_dir):
        if name.endswith(_PREVIOUS):
            target = file_utils.join(folder, name.removesuffix(_PREVIOUS))
            file_utils.copy(file_utils.join(callback.backup_dir, name), target)


def previous_path(path: str) -> str:
    """The path of a file's counterpart in the state before."""
    return f"{path}{_PREVIOUS}"


def _paths(callback: keras.callbacks.BackupAndRestore, suffix: str) -> tuple[str, str, str]:
    """Paths of a state's weights, of its metadata and of its digests."""
    weights, metadata = str(callback._weights_path), str(callback._training_metadata_path)
    listed = file_utils.join(callback.backup_dir, _DIGESTS)
    return f"{weights}{suffix}", f"{metadata}{suffix}", f"{listed}{suffix}"


def _read(
    callback: keras.callbacks.BackupAndRestore, suffix: str
) -> tuple[dict[str, Any] | None, Any]:
    """The state with a suffix, or None, and what is wrong with it."""
    weights, metadata, listed = _paths(callback, suffix)
    state = {"is_previous": bool(suffix), "has_digests": file_utils.exists(listed)}
    state["worker_files"] = {}
    if state["has_digests"]:
        try:
            content = _listed(listed)
        except (ValueError, OSError, tf.errors.OpError) as error:
            return None, f"{listed} cannot be read: {error}"
        state["worker_files"] = content["worker_files"]
        state["has_training"] = TRAINING in content["files"]
        for name, expected in content["files"].items():
            path = file_utils.join(callback.backup_dir, f"{name}{suffix}")
            problem = integrity.problem_of(path, expected)
            if problem:
                return None, problem
    else:
        training = file_utils.join(callback.backup_dir, f"{TRAINING}{suffix}")
        state["has_training"] = _is_archive(training)
    for path in (weights, metadata):
        if not file_utils.exists(path):
            return None, f"{path} is missing"
    try:
        state["tables"] = _tables(callback, suffix)
    except (ValueError, OSError, tf.errors.OpError) as error:
        return None, f"{error}"
    try:
        integrity.check_regular(weights)
        state["epoch"] = _epoch(metadata)
    except (ValueError, OSError, tf.errors.OpError) as error:
        return None, f"{getattr(error, 'filename', None) or metadata} cannot be read: {error}"
    return state, None


def _is_archive(path: str) -> bool:
    """Whether a file is there and can be read as numpy's archives are."""
    return bool(file_utils.exists(path) and zipfile.is_zipfile(io.BytesIO(_bytes(path))))


def _tables(callback: keras.callbacks.BackupAndRestore, suffix: str) -> dict[str, Any] | None:
    """List of tables of a state, or None, also beside an earlier one's."""
    *_, listed = _paths(callback, suffix)
    if file_utils.exists(listed) and LIST not in _listed(listed)["files"]:
        return None
    return read_list(callback.backup_dir, f"{LIST}{suffix}")


def _listed(path: str) -> dict[str, Any]:
    content = integrity.from_json(_bytes(path), must_have_digest=True)
    if content["format"] != _FORMAT:
        raise ValueError(f"it has the format {content['format']}, and this version knows {_FORMAT}")
    return content


def _epoch(path: str) -> int:
    epoch = integrity.from_json(_bytes(path)).get("epoch")
    if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
        raise ValueError(f"its epoch is {epoch!r}")
    return epoch


def _bytes(path: str) -> bytes:
    with integrity.open_file(str(path)) as file:
        content: bytes = file.read()
    return content


def _names(folder: str) -> list[str]:
    return sorted(name.rstrip("/") for name in file_utils.listdir(folder))


# Atomic replacement of BackupAndRestore's files.
#
# After a kill at any moment, the folder holds one complete state: the new one or the one before.
#
# Keras overwrites the weights and then the epoch's number. Here both, and the other files of the
# state, are first written to a temporary folder beside them; renaming that folder commits the new
# state. The files are then moved to Keras's paths; a start after a kill completes that move.


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
            write_digests(writing, worker_files)
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
        remove_last(callback)
        copy_previous(callback, writing)
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
            tf.io.gfile.rename(final, previous_path(final), overwrite=True)
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
