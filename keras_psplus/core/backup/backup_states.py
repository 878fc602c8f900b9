"""The states in BackupAndRestore's folder, and whether each of them is whole.

A state is the weights, the epoch and what else belongs to them. `digests.json`, which is written
with them, has the SHA-256 of each file, and those of the files that workers have written for the
same step. States of Keras itself, and those whose digests were deleted, are checked by what they
say, and have no workers' files.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.files import integrity
from keras_psplus.files.replace import sync
from keras_psplus.files.tables import LIST, read_list, stems_of
from keras_psplus.keras_internals.keras_parts import file_utils
from keras_psplus.log import logger

if TYPE_CHECKING:
    import keras

SEEDS = "seed_generators.json"
TRAINING = "training_state.npz"
_DIGESTS = "digests.json"
_FORMAT = 1
# What Keras adds to the names of the state before, with `double_checkpoint`.
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
