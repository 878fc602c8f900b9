"""A folder for each local job of this user, from which `keras-psplus status` reads.

The launcher writes `job.json` there, and each task its own file. Folders lie below one that belongs
to this user alone. The launcher removes its own at the end; one that was killed leaves it behind,
for the next one to remove.
"""

import contextlib
import json
import os
import pathlib
import shutil
import stat
import tempfile
from collections.abc import Iterable
from typing import Any

from keras_psplus.cluster.monitor.json_log import encode
from keras_psplus.cluster.process import process_state

FOLDER_VARIABLE = "KERAS_PSPLUS_JOB_DIR"
_JOB, _FAILED, _SERVES = "job.json", ".failed", ".serves"


def root() -> pathlib.Path:
    """The folder of this user's jobs, which need not exist."""
    return pathlib.Path(tempfile.gettempdir()) / f"keras_psplus_jobs_{os.getuid()}"


def make() -> pathlib.Path:
    """Makes a folder for a job of this process.

    Raises:
        OSError: If it cannot be made, or others could write to it.
    """
    above = root()
    with contextlib.suppress(FileExistsError):
        above.mkdir(mode=0o700)
    check(above)
    _clear(above)
    return pathlib.Path(
        tempfile.mkdtemp(prefix=f"{os.getpid()}-{process_state.namespace()}-", dir=above)
    )


def _clear(above: pathlib.Path) -> None:
    """Removes what launchers have left that were killed."""
    with contextlib.suppress(OSError):
        for folder in above.iterdir():
            # Another container, which may have this folder too, has process ids of its own.
            pid, _, others = folder.name.partition("-")
            if not pid.isdigit() or others.partition("-")[0] != process_state.namespace():
                continue
            birth = (_read(folder / _JOB) or {}).get("birth")
            if process_state.state_of(int(pid), birth) == process_state.ENDED:
                remove(folder)


def check(above: pathlib.Path) -> None:
    """Checks that a folder is this user's alone.

    Raises:
        OSError: If it is not there, a link, another user's, or others can write to it.
    """
    found = os.lstat(above)
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or found.st_mode & 0o022:
        raise PermissionError(
            f"{above} is not a folder that this user alone can write to. Remove it, or set TMPDIR. "
            f"Received: owner {found.st_uid}, mode {stat.filemode(found.st_mode)}"
        )


def is_running(job: dict[str, Any]) -> bool:
    """Whether a job's launcher runs, by what `read_all` has of it."""
    return process_state.state_of(job["pid"], job["birth"]) != process_state.ENDED


def write_job(folder: pathlib.Path, job: dict[str, Any]) -> None:
    """Writes what the launcher knows of its job.

    Raises:
        OSError: If it cannot be written.
    """
    _replace(folder / _JOB, job)


def write_task(folder: pathlib.Path, name: str, state: dict[str, Any]) -> None:
    """Writes what a task says of itself.

    Raises:
        OSError: If it cannot be written.
    """
    _replace(folder / f"{name}.json", state)


def account_of(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Path of a task's account of its time, as of `goodput.TimeSheet`."""
    return folder / f"{name}.account"


def mark_failed(folder: pathlib.Path, name: str) -> None:
    """Marks a task as failed: its error has been logged, and it may be ended.

    Raises:
        OSError: If it cannot be written.
    """
    (folder / f"{name}{_FAILED}").touch()


def have_failed(folder: pathlib.Path, names: Iterable[str]) -> bool:
    """Whether all of some tasks have noted that."""
    return all((folder / f"{name}{_FAILED}").exists() for name in names)


def mark_serving(folder: pathlib.Path, name: str) -> None:
    """Marks a task as serving a chief, without state or messages to save.

    Raises:
        OSError: If it cannot be written.
    """
    (folder / f"{name}{_SERVES}").touch()


def is_serving(folder: pathlib.Path, name: str) -> bool:
    """Whether a task has noted that."""
    return (folder / f"{name}{_SERVES}").exists()


def forget_marks(folder: pathlib.Path) -> None:
    """Forgets what tasks have noted, as they are about to be started again."""
    for suffix in (_FAILED, _SERVES):
        for path in folder.glob(f"*{suffix}"):
            path.unlink(missing_ok=True)


def read_all() -> list[tuple[pathlib.Path, dict[str, Any], dict[str, dict[str, Any]]]]:
    """Reads the jobs of this user.

    Returns:
        List of each one's folder, what its launcher says, and a dict from tasks to what they say.

    Raises:
        OSError: If the folder of jobs is there, but is not this user's alone.
    """
    above = root()
    if not os.path.lexists(above):
        return []
    check(above)
    found = []
    for folder in sorted(above.iterdir()):
        job = _read(folder / _JOB)
        if job is not None:  # Else it is being made, or removed.
            tasks = {name: _read(folder / f"{name}.json") or {} for name in job.get("tasks", ())}
            found.append((folder, job, tasks))
    return sorted(found, key=lambda each: each[1].get("began", ""))


def remove(folder: pathlib.Path) -> None:
    """Removes the folder of a job that has ended."""
    shutil.rmtree(folder, ignore_errors=True)


def _replace(path: pathlib.Path, value: Any) -> None:
    own = path.with_name(f".{path.name}.{os.getpid()}")
    own.write_text(encode(value))
    os.replace(own, path)


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
