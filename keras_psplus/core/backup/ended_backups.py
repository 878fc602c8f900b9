"""Backup of a `fit` that has ended, kept until the script has ended well.

Keras deletes a backup at the end of `fit`. What comes after may fail, and a launcher starts the
script again: it would train everything once more. So the folder is renamed to a hidden one beside
it, which the next start of the same job takes back. Where nothing starts a job again, it is
deleted at once.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil

from keras_psplus.cluster.environment import RESTART_VARIABLE, TOKEN_VARIABLE
from keras_psplus.cluster.process import exit_code
from keras_psplus.core.jobs import failure, job_failure
from keras_psplus.files import atomic, ownership

_MARKER, _TAKING = ".keras_psplus-ended", ".keras_psplus-taken"
_TEXT = "A job's backup after its training: keras_psplus deletes it when the job's script ends.\n"
# Set by Slurm for jobs that it starts again.
_SLURM_JOB, _SLURM_RESTARTS = "SLURM_JOB_ID", "SLURM_RESTART_COUNT"
_kept: set[str] = set()


def job() -> str | None:
    """Id of this job, the same in all of its restarts; None if unknown."""
    if RESTART_VARIABLE in os.environ and os.environ.get(TOKEN_VARIABLE):
        return os.environ[TOKEN_VARIABLE]
    return os.environ.get(_SLURM_JOB)


def keep(folder: str | os.PathLike[str]) -> str | None:
    """Keeps a backup for the job's next start, if there may be one.

    Args:
        folder: The folder, which is gone after that; a symbolic link leads to an empty one.

    Returns:
        Path where it is kept, or None: then it is as it was.
    """
    path = os.path.realpath(folder)
    if job() is None or "://" in os.fspath(folder) or not os.path.isdir(path):
        return None
    kept = _kept_path(path)
    try:
        with open(os.path.join(path, _MARKER), "w") as file:
            file.write(_TEXT)
        _remove(kept)
        os.rename(path, kept)
        if os.path.islink(folder):
            os.mkdir(path)
        atomic.sync(os.path.dirname(path))
    except OSError:
        return None  # It may be a disk of its own.
    _note(kept)
    return kept


def take_back(folder: str | os.PathLike[str]) -> None:
    """Restores a backup that an earlier start of this job has kept.

    Only if there is no newer one.

    Raises:
        OSError: If it cannot be moved.
    """
    if job() is None or "://" in os.fspath(folder):
        return
    path = os.path.realpath(folder)
    kept = _kept_path(path)
    if not os.path.exists(os.path.join(kept, _MARKER)):
        return
    if not _was_started_before():
        _remove(kept)  # Of another job with the same token.
        return
    if kept in _kept:
        return  # A call of `fit` in this process has ended, and this is another one.
    _note(kept)
    names, taking = os.listdir(path) if os.path.isdir(path) else [], os.path.join(kept, _TAKING)
    # A kill may have come in between.
    if os.path.exists(taking) or all(name.startswith(".keras_psplus-") for name in names):
        os.makedirs(path, exist_ok=True)
        with open(taking, "w"):
            pass
        for name in os.listdir(kept):
            # The folder has its present owner's name already.
            if name not in (_MARKER, _TAKING, ownership.FILE):
                os.rename(os.path.join(kept, name), os.path.join(path, name))
        _remove(kept)


def _note(kept: str) -> None:
    """Deletes a kept backup when the script ends well, whichever start has made it."""
    if not _kept:
        exit_code.watch()
        atexit.register(_at_exit)
    _kept.add(kept)


def _kept_path(path: str) -> str:
    parent, name = os.path.split(path)
    of_job = hashlib.sha256(f"{job()}".encode()).hexdigest()[:8]
    return os.path.join(parent, f".{name}.ended-{of_job}")


def _was_started_before() -> bool:
    counts = os.environ.get(RESTART_VARIABLE), os.environ.get(_SLURM_RESTARTS)
    return any(count not in (None, "", "0") for count in counts)


def _remove(kept: str) -> None:
    if os.path.exists(os.path.join(kept, _MARKER)):
        shutil.rmtree(kept, ignore_errors=True)


def _at_exit() -> None:
    if exit_code.is_bad() or failure.has_failed() or job_failure.has_failed():
        return
    for kept in _kept:
        _remove(kept)
