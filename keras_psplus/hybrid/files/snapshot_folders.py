"""The folders that snapshots make in `snapshot_dir`, each with a marker file; others stay.

A folder is marked when it is made. One that held something before gets no marker, and so is never
deleted, whatever its name is.
"""

import os
import re
from collections.abc import Collection

import tensorflow as tf

from keras_psplus.hybrid.files import shard_files
from keras_psplus.hybrid.files.table_files import LIST

MARKER = "MADE_BY_KERAS_PSPLUS"
_TEXT = "HybridStrategy(snapshot_dir=...) has made this folder, and deletes it with its contents.\n"
STATES = "compression"
_STEP = re.compile(r"step-\d+")
_MOST_NAMES = 5


def claim(path: str) -> None:
    """Makes a folder, and marks it if nothing is in it.

    Raises:
        OSError: If it cannot.
    """
    with shard_files.translate_file_errors("write", path):
        tf.io.gfile.makedirs(path)
        # Other tasks may do the same at this moment: they write the same.
        if not shard_files.find(path, "*"):
            with tf.io.gfile.GFile(os.path.join(path, MARKER), "w") as file:
                file.write(_TEXT)


def unused(directory: str, step: int) -> str:
    """Path for a step's folder.

    An existing folder is reused only if it is empty or the snapshots have made it.
    """
    digits = 10
    while True:
        path = os.path.join(directory, f"step-{step:0{digits}d}")
        if is_own(path) or not tf.io.gfile.exists(path) or not shard_files.find(path, "*"):
            return path
        digits += 1


def is_own(path: str) -> bool:
    """Whether a folder has the marker."""
    return not os.path.islink(path) and bool(shard_files.find(path, MARKER))


def keep_only(directory: str, names: Collection[str]) -> None:
    """Deletes the snapshots' own folders in a directory, but for those of some names."""
    for name in _names(directory):
        path = os.path.join(directory, name)
        if _STEP.fullmatch(name) and name not in names and is_own(path):
            remove(path)


def remove(path: str) -> None:
    """Deletes a folder if it has the marker."""
    if not is_own(path):
        return
    # What a kill leaves of it must not be taken for a snapshot, nor for somebody else's.
    names = sorted(_names(path), key=lambda name: (name != LIST, name == MARKER))
    for name in names:
        shard_files.remove_tree(os.path.join(path, name))
    shard_files.remove_tree(path)


def others(directory: str) -> str | None:
    """Names entries of a directory that the snapshots have not made; else None."""
    names = [
        name
        for name in _names(directory)
        # Hidden ones may be those by which another task sees that it can write.
        if not name.startswith(".") and not _is_own_in(directory, name)
    ]
    if not names:
        return None
    more = len(names) - _MOST_NAMES
    listed = ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    return (
        f"snapshot_dir={directory!r} holds what this strategy has not made. It stays there: only "
        f"folders with the file {MARKER} are deleted. Received: {listed}"
    )


def _is_own_in(directory, name):
    is_ours = bool(_STEP.fullmatch(name)) or name == STATES
    return is_ours and is_own(os.path.join(directory, name))


def _names(directory):
    return [os.path.basename(path) for path in shard_files.find(directory, "*")]
