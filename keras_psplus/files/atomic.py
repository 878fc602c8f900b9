"""Atomic writes of files and folders, also by several processes at once.

Each writer has a separate temporary folder beside the target, from which everything is renamed into
place. Files that a killed writer has left there are deleted by the next one.
"""

import contextlib
import ctypes
import hashlib
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterator

import tensorflow as tf

from keras_psplus import process_identity

_TEMPORARY = re.compile(r"\.keras_psplus-(.+)-([0-9a-f]{8})-([0-9a-f]{8})-(\d+)-\d+")
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100
_counter = itertools.count()
# Temporary folders in which this process writes now.
_active: set[str] = set()


@contextlib.contextmanager
def written(target: str | os.PathLike[str], task: str | None = None) -> Iterator[str]:
    """Context that returns a temporary path and moves it to the target on exit.

    Other entries beside the path, in the same folder, are moved as well, before the path itself.
    Waits for no other process: of several writers, the last one's files stay. Of folders, which are
    read file by file, those of the first writer to end stay where others had begun before.

    Args:
        target: Path of a file or folder on a local disk. Its folder must exist.
        task: Name of this process's task, which no two running processes of a job share; None if
            it has none.

    Example:

    ```python
    with written("model.keras", "worker-0") as path:
        model.save(path)
    ```
    """
    target = os.path.realpath(target)
    parent, name = os.path.split(target)
    beside = target if _must_stay(target) else parent
    clear(target, task)
    before = _identity(target)
    own = os.path.join(beside, _temporary_name(target, task))
    _active.add(own)
    try:
        try:
            os.mkdir(own)
        except OSError as error:
            error.filename = target
            raise
        path = os.path.join(own, name)
        yield path
        # A reader that finds the file that names the others finds those, too.
        found = sorted(os.listdir(own), key=lambda n: (n.endswith(".json"), n == name))
        for each in found:
            if each == name and os.path.isdir(path) and _identity(target) not in (None, before):
                continue
            _put(os.path.join(own, each), os.path.join(parent, each))
    finally:
        shutil.rmtree(own, ignore_errors=True)
        _active.discard(own)


@contextlib.contextmanager
def uploaded(target: str) -> Iterator[str]:
    """As `written`, for a target that only `tf.io.gfile` reaches: its files are copied there."""
    folder, _, name = target.rstrip("/").rpartition("/")
    with tempfile.TemporaryDirectory(prefix="keras_psplus_") as own:
        yield os.path.join(own, name)
        files = sorted(_files_of(own), key=lambda n: (n.endswith(".json"), n == name))
        for file in files:
            there = f"{folder}/{file}"
            tf.io.gfile.makedirs(os.path.dirname(there))
            tf.io.gfile.copy(os.path.join(own, file), there, overwrite=True)


def clear(target: str | os.PathLike[str], task: str | None = None) -> None:
    """Deletes what killed writers have left where a target is written.

    That is known of processes of this machine that have ended, and of earlier processes of the same
    task that wrote the same target.
    """
    target = os.path.realpath(target)
    parent = os.path.dirname(target)
    for folder in {parent, target} if os.path.isdir(target) else {parent}:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                path = os.path.join(folder, name)
                if _is_left(path, name, target, task):
                    shutil.rmtree(path, ignore_errors=True)


def _is_left(path: str, name: str, target: str, task: str | None) -> bool:
    match = _TEMPORARY.fullmatch(name)
    if match is None or path in _active:
        return False
    writer, of_target, machine, process = match.groups()
    if machine == process_identity.machine():
        return int(process) == os.getpid() or not process_identity.runs(int(process))
    return task is not None and (writer, of_target) == (task, _digest(target))


def _temporary_name(target: str, task: str | None) -> str:
    place = f"{process_identity.machine()}-{os.getpid()}-{next(_counter)}"
    return f".keras_psplus-{task or 'local'}-{_digest(target)}-{place}"


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:8]


def _identity(path: str) -> tuple[int, int] | None:
    """Identity of a path, which changes if it is replaced; None without one."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _must_stay(target: str) -> bool:
    """Whether a folder cannot be replaced, so that its contents must be."""
    is_fixed = os.path.ismount(target) or not os.access(os.path.dirname(target), os.W_OK)
    return os.path.isdir(target) and is_fixed


def _put(source: str, target: str) -> None:
    if not os.path.isdir(source):
        os.replace(source, target)
        return
    try:
        os.rename(source, target)
        return
    except OSError:
        if not os.path.isdir(target):
            raise
    # All that is in it now is replaced by what has the same name; otherwise it has to stay.
    if _files_of(target) <= _files_of(source) and _exchange(source, target):
        return
    # Folders first: the file that names what is in them is the last one.
    for name in sorted(os.listdir(source), key=lambda n: not os.path.isdir(f"{source}/{n}")):
        _put(os.path.join(source, name), os.path.join(target, name))


def _exchange(first: str, second: str) -> bool:
    """Swaps two folders in one step; returns whether it could."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    paths = os.fsencode(first), os.fsencode(second)
    return bool(rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0)


def _files_of(folder: str) -> set[str]:
    """Relative paths of all files in a folder, a set."""
    return {
        os.path.relpath(os.path.join(where, name), folder)
        for where, folders, names in os.walk(folder)
        for name in names + [f for f in folders if os.path.islink(os.path.join(where, f))]
    }
