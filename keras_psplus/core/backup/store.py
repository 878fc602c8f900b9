"""Backups in BackupAndRestore's folder, each of them a folder that is written once.

    LATEST            names of the last backup and, with `double_checkpoint`, of the one before
    backup-12/        Keras's two files, what else belongs to them, and `manifest.json`, the last:
                      the SHA-256 of each of them, and of the workers' files for the same step
    compression/      files of workers, and
    tables-*          of servers, which may be on disks of their own, and serve several backups
    ENDED-*           LATEST of a `fit` that has ended, kept until the script has ended well
    latest.weights.h5/  a folder in place of Keras's file. Keras without a strategy of this library
                      looks for that file alone: it would find nothing, and delete all in the end

A new backup counts once LATEST has been replaced. What it does not name is no backup: it was cut
short or is out of date, and is removed before the next one is written.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from typing import Any, TypedDict

import keras
import numpy as np
import tensorflow as tf

from keras_psplus.cluster.environment import RESTART_VARIABLE, TOKEN_VARIABLE
from keras_psplus.cluster.process import signals
from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.core.jobs import failure
from keras_psplus.files import integrity, ownership
from keras_psplus.files.replace import replace, sync
from keras_psplus.files.tables import BACKUP, LATEST, LIST, latest, read_list, stems_of
from keras_psplus.keras_internals.keras_parts import file_utils, saving_lib
from keras_psplus.log import logger

WEIGHTS, METADATA = "latest.weights.h5", "training_metadata.json"
SEEDS, TRAINING = "seed_generators.json", "training_state.npz"
_MANIFEST, _FORMAT = "manifest.json", 2
# Files of a backup; of a list that was cut short, too.
_FILES = re.compile(rf"{WEIGHTS}|{METADATA}|{SEEDS}|{TRAINING}|{_MANIFEST}|\.?{LIST}(\.\w+)?")
# Names that versions before this format had in the folder itself.
_FORMER = "digests.json", "complete"
_OF_KERAS = re.compile(rf"({re.escape(WEIGHTS)}|{re.escape(METADATA)})(\.bkp)?")
_NOTE, _NOTE_TEXT = (
    "OF_KERAS_PSPLUS.txt",
    (
        "The folder above has the backup of a job that trained under a strategy of keras_psplus.\n"
        "Keras alone cannot read it. To go on, train under that strategy again (in one process:\n"
        "keras-psplus run --workers 1 train.py); to train from the beginning, delete the folder.\n"
    ),
)
_CUT_SHORT = re.compile(rf"\.{LATEST}\.[0-9a-f]{{32}}")
_OTHERS = re.compile(
    rf"{LATEST}|\.?{re.escape(ownership.FILE)}(\.[0-9a-f]{{32}})?|compression"
    r"|tables-[0-9a-f]+-\d+-of-\d+\..+"
)
_ENDED = re.compile(r"ENDED-[0-9a-f]{8}")
# Set by Slurm for jobs that it starts again.
_SLURM_JOB, _SLURM_RESTARTS = "SLURM_JOB_ID", "SLURM_RESTART_COUNT"
# Bytes of the files beside those of the numbers.
_OVERHEAD, _OVERHEAD_OF_VARIABLE = 1 << 15, 1 << 12
_ERRORS: tuple[type[Exception], ...] = (*integrity.ERRORS, ValueError)
# Folders with backups of a `fit` that has ended, by which start of the job it may be.
_kept: set[str] = set()


class Backup(TypedDict):
    """A whole backup; workers tell each other of it as JSON.

    `worker_files` are names and digests, `tables` the list of what servers have written. One of
    Keras itself lies in the folder, without a manifest.
    """

    path: str
    epoch: int
    has_manifest: bool
    has_training: bool
    worker_files: dict[str, str]
    tables: dict[str, Any] | None


def take(folder: str, owner: str) -> None:
    """Makes this process the folder's owner; takes up what this job has kept.

    Args:
        owner: Name of this process, for others.

    Raises:
        OSError: If another job's process is its owner, or it cannot be written.
    """
    with translate_file_errors(folder):
        ownership.claim(folder, owner, "backup_dir", _job())
        ended = _ended_path(folder)
        # A call of `fit` in this process may have ended, and this be another one.
        if ended is None or not os.path.exists(ended) or os.path.abspath(folder) in _kept:
            return
        if not _was_started_before():
            os.remove(ended)  # Of another job with the same token.
            return
        _keep(folder)
        if not os.path.exists(os.path.join(folder, LATEST)):
            os.rename(ended, os.path.join(folder, LATEST))


def find(folder: str) -> list[Backup]:
    """The whole backups in a folder, the newest first.

    Raises:
        OSError: If there are backups, but no whole one, or if it has another format.
    """
    found: list[Backup] = []
    problems: list[str] = []
    try:
        names = latest(folder)
    except _ERRORS as error:
        raise damaged(folder, [f"{error}"]) from None
    for name in names:
        try:
            found.append(_read(file_utils.join(folder, name)))
        except _ERRORS as error:
            problems.append(f"{error}")
            continue
        if not found[-1]["worker_files"] and found[-1]["tables"] is None:
            # Nothing can be wrong with it any more: the one before need not be read.
            break
    if problems and not found:
        raise damaged(folder, problems)
    if found and found[0]["path"] != file_utils.join(folder, names[0]):
        warn_of_previous(folder, problems, found[0])
    return found if names else _find_keras_own(folder)


def _read(path: str) -> Backup:
    """Reads what a backup's manifest says, and checks its files."""
    content = _manifest(path)
    for name, expected in content["files"].items():
        problem = integrity.problem_of(file_utils.join(path, name), expected)
        if problem:
            raise ValueError(problem)
    return Backup(
        path=path,
        epoch=_epoch(path),
        has_manifest=True,
        has_training=TRAINING in content["files"],
        worker_files=content["worker_files"],
        tables=read_list(path),
    )


def _find_keras_own(folder: str) -> list[Backup]:
    former = [name for name in _FORMER if file_utils.exists(file_utils.join(folder, name))]
    if former:
        raise OSError(
            f"The backup in {folder} has the format of an earlier version of keras_psplus, which "
            "wrote its files to the folder itself. End that training with the version that has "
            "begun it, or delete the folder to train from the beginning. "
            f"Received: {', '.join(former)} without {LATEST}"
        )
    if not file_utils.exists(file_utils.join(folder, WEIGHTS)) or _has_guard(folder):
        return []
    try:
        integrity.check_regular(file_utils.join(folder, WEIGHTS))
        epoch = _epoch(folder)
    except _ERRORS as error:
        raise damaged(folder, [f"{error}"]) from None
    of_keras = {"has_manifest": False, "has_training": False, "worker_files": {}, "tables": None}
    return [Backup(path=folder, epoch=epoch, **of_keras)]  # type: ignore[typeddict-item]


def damaged(folder: str, problems: Iterable[str]) -> OSError:
    """The error for a folder that has no whole backup."""
    return OSError(
        f"BackupAndRestore's state in {folder} is damaged or incomplete, and there is no older "
        "whole one. Put that file back from a copy, or delete the folder to train from the "
        f"beginning. Received: {'; '.join(problems)}"
    )


def warn_of_previous(folder: str, problems: Iterable[str], backup: Backup) -> None:
    """Says that training resumes from an older backup than the last."""
    logger.warning(
        "the last state of BackupAndRestore in %s is damaged or incomplete; training resumes from "
        "the one before, at epoch %d. Received: %s",
        folder,
        backup["epoch"] + 1,
        "; ".join(problems),
    )


def worker_files_in_use(folder: str) -> list[str] | None:
    """Names of the workers' files that backups need; None if unknown."""
    try:
        return sorted({name for p in _in_use(folder) for name in _manifest(p)["worker_files"]})
    except _ERRORS:
        return None


def stems_in_use(folder: str) -> list[str] | None:
    """Beginnings of the names of servers' files that backups need; None if unknown."""
    try:
        lists = [read_list(path) for path in _in_use(folder)]
    except _ERRORS:
        return None
    return [stem for listed in lists if listed is not None for stem in stems_of(listed)]


def path_of_training(folder: str) -> str | None:
    """The last backup's path, if it has the state of a `fit`."""
    with contextlib.suppress(*_ERRORS):
        for name in latest(folder)[:1]:
            if file_utils.exists(file_utils.join(folder, name, TRAINING)):
                return str(file_utils.join(folder, name))
    return None


def _in_use(folder: str) -> list[str]:
    """Paths of the backups that count, also of a `fit` that has ended."""
    ended = _ended_path(folder)
    names = latest(folder) + (latest(folder, os.path.basename(ended)) if ended else [])
    return [file_utils.join(folder, name) for name in names]


def _manifest(path: str) -> dict[str, Any]:
    path = file_utils.join(path, _MANIFEST)
    try:
        content = integrity.from_json(_bytes(path), must_have_digest=True)
        if content["format"] != _FORMAT:
            found = content["format"]
            raise ValueError(f"it has the format {found}, and this version knows {_FORMAT}")
    except _ERRORS as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return content


def _epoch(path: str) -> int:
    path = file_utils.join(path, METADATA)
    try:
        epoch = integrity.from_json(_bytes(path)).get("epoch")
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"its epoch is {epoch!r}")
    except _ERRORS as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return epoch


def _bytes(path: str) -> bytes:
    with integrity.open_file(path) as file:
        content: bytes = file.read()
    return content


# Writing, and what is removed.


@contextlib.contextmanager
def written(
    folder: str, worker_files: dict[str, str], needed: int, keeps_previous: bool = False
) -> Iterator[str]:
    """Context in which a backup is written to a new folder.

    It counts from the context's end on.

    Args:
        worker_files: Dict from names to digests of the files that workers have written for it.
        needed: Bytes that this process writes at least.

    Yields:
        The new folder's path.

    Raises:
        OSError: If it cannot be written. The one before stays.
    """
    with translate_file_errors(folder):
        ownership.check(folder)
        numbers = [int(match[1]) for match in map(BACKUP.fullmatch, _names(folder)) if match]
        _prune(folder)
        before = latest(folder)
        name = f"backup-{max(numbers, default=0) + 1}"
        path = file_utils.join(folder, name)
        file_utils.makedirs(path)
    try:
        # TensorFlow's errors here are about variables of other tasks.
        with translate_file_errors(folder, (OSError,)):
            _check_room(needed, path)
            yield path
        with translate_file_errors(folder):
            _write_manifest(path, worker_files)
            _count(folder, [name, *before[: int(keeps_previous)]])
    except OSError:
        with contextlib.suppress(*_ERRORS):
            _prune(folder)
        raise
    with contextlib.suppress(*_ERRORS):
        _prune(folder)
        _guard(folder)


def _write_manifest(path: str, worker_files: dict[str, str]) -> None:
    files = {n: integrity.digest_of_file(file_utils.join(path, n)) for n in _names(path)}
    content = {"format": _FORMAT, "files": files, "worker_files": worker_files}
    write_text(file_utils.join(path, _MANIFEST), integrity.to_json(content, indent=1))
    # Before it counts, also if the power fails.
    for name in (*files, _MANIFEST, "", ".."):
        sync(file_utils.join(path, name))


def _count(folder: str, names: list[str]) -> None:
    replace(file_utils.join(folder, LATEST), "".join(f"{n}\n" for n in names).encode())


def use(folder: str, backup: Backup) -> None:
    """Has a backup count as the last one, as a newer one is not whole.

    Raises:
        OSError: If that cannot be written.
    """
    with translate_file_errors(folder):
        names = latest(folder)
        at = names.index(name) if (name := os.path.basename(backup["path"])) in names else 0
        if at:
            _count(folder, names[at:])


def write_text(path: str, text: str) -> None:
    with file_utils.File(path, "w") as file:
        file.write(text)


def translate_file_errors(
    folder: str, errors: tuple[type[Exception], ...] = integrity.ERRORS
) -> contextlib.AbstractContextManager[None]:
    """Says what to do about a disk that is full or that cannot be written.

    Raises:
        OSError: In place of what TensorFlow or the system raises.
    """
    return integrity.translated(
        lambda reason: (
            f"BackupAndRestore's state could not be written to {folder}; the one before stays, if "
            "there was one. Make room on that disk, or see to its rights, and start the job again. "
            f"Received: {reason}"
        ),
        errors,
    )


def end(folder: str) -> bool:
    """Deletes the backups of an ended `fit`, or keeps them for the job.

    What comes after `fit` may fail, and a launcher starts the script again: it would train
    everything once more, and so takes this backup up again.

    Returns:
        Whether they are kept until then.

    Raises:
        OSError: If they cannot be deleted. What is left is no backup.
    """
    ended = _ended_path(folder)
    if ended is not None:
        with contextlib.suppress(FileNotFoundError):
            os.replace(os.path.join(folder, LATEST), ended)
        if os.path.exists(ended):
            sync(folder)
            _keep(folder)
            return True
    delete(folder)
    return False


def delete(folder: str) -> None:
    """Deletes files of backups in a folder, and the folder if it is empty.

    Raises:
        OSError: If it cannot. What is left is no backup.
    """
    if not file_utils.exists(folder):
        return
    # Without this the others are no backup.
    for name in sorted(_names(folder), key=lambda n: (n != LATEST, n)):
        is_file = any(own.fullmatch(name) for own in (_OTHERS, _ENDED, _OF_KERAS, _CUT_SHORT))
        if is_file or _is_backup(folder, name):
            _remove(file_utils.join(folder, name))
    if not _names(folder) and not os.path.islink(folder):
        _remove(folder)


def has_any(folder: str) -> bool:
    """Whether there are backups that count, or will."""
    # In this order, in which one is renamed to the other.
    return LATEST in _names(folder) or any(map(_ENDED.fullmatch, _names(folder)))


def _prune(folder: str) -> None:
    """Removes folders of backups that nothing names."""
    names = latest(folder)
    needed = {os.path.basename(path) for path in ([] if names else _in_use(folder))}.union(names)
    # Nothing from before the first that counts is needed any more.
    replaced = (_ENDED, _OF_KERAS, _CUT_SHORT) if names else ()
    for name in _names(folder):
        is_unnamed = name not in needed and _is_backup(folder, name)
        is_replaced = any(pattern.fullmatch(name) for pattern in replaced)
        if is_unnamed or is_replaced and not (name == WEIGHTS and _has_guard(folder)):
            _remove(file_utils.join(folder, name))


def _guard(folder: str) -> None:
    """Has Keras without a strategy end with an error, which names this folder."""
    path = file_utils.join(folder, WEIGHTS)
    if not file_utils.exists(path):
        file_utils.makedirs(path)
    if not _names(path):
        write_text(file_utils.join(path, _NOTE), _NOTE_TEXT)


def _has_guard(folder: str) -> bool:
    """Whether a folder of this library is where Keras has its file, perhaps half made."""
    path = file_utils.join(folder, WEIGHTS)
    return bool(file_utils.isdir(path)) and set(_names(path)) <= {_NOTE}


def _is_backup(folder: str, name: str) -> bool:
    """Whether it has the name of a backup, and no file that no backup has."""
    path = file_utils.join(folder, name)
    if not BACKUP.fullmatch(name) or not file_utils.isdir(path):
        return False
    return all(map(_FILES.fullmatch, _names(path)))


def _names(folder: str) -> list[str]:
    if not file_utils.exists(folder):
        return []
    return sorted(name.rstrip("/") for name in file_utils.listdir(folder))


def _remove(path: str) -> None:
    while file_utils.exists(path) or os.path.islink(path):
        # Other workers delete files of theirs at the same time; what is left then is deleted here.
        with contextlib.suppress(FileNotFoundError, tf.errors.NotFoundError):
            if file_utils.isdir(path) and not os.path.islink(path):
                file_utils.rmtree(path)
            else:
                file_utils.remove(path)


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


# Of a `fit` that has ended, until the script has.


def _job() -> str | None:
    """Id of this job, the same in all of its restarts; None if unknown."""
    if RESTART_VARIABLE in os.environ and os.environ.get(TOKEN_VARIABLE):
        return os.environ[TOKEN_VARIABLE]
    return os.environ.get(_SLURM_JOB)


def _was_started_before() -> bool:
    counts = os.environ.get(RESTART_VARIABLE), os.environ.get(_SLURM_RESTARTS)
    return any(count not in (None, "", "0") for count in counts)


def _ended_path(folder: str) -> str | None:
    """Path of what LATEST becomes; None where nothing starts a job again, or cannot rename."""
    job = _job()
    if job is None or "://" in folder:
        return None
    return os.path.join(folder, f"ENDED-{hashlib.sha256(job.encode()).hexdigest()[:8]}")


def _keep(folder: str) -> None:
    """Deletes backups when the script ends well, whichever start has made them."""
    if not _kept:
        signals.watch()
        atexit.register(_at_exit)
    _kept.add(os.path.abspath(folder))


def _at_exit() -> None:
    if signals.is_bad() or failure.has_failed() or failure.has_lost_tasks():
        return
    for folder in _kept:
        with contextlib.suppress(*_ERRORS):
            os.remove(_ended_path(folder) or "")
            # Another job may be at work there by now; its next backup removes these.
            if not os.path.exists(os.path.join(folder, ownership.FILE)):
                (_prune if latest(folder) else delete)(folder)


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
