"""One owner at a time for a folder in which a job keeps its state.

The owner's name lies in the folder. Whether it still runs is known at once of a process of this
machine; of another machine's, by a number that each owner counts up.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_psplus import process_identity
from keras_psplus.files.replace import replace
from keras_psplus.log import logger

FILE = ".keras_psplus-owner.json"
# Between two signs of life, and how long a missing one counts as an end; remote folders cost more.
_BEAT_SECONDS, _REMOTE_BEAT_SECONDS, _MISSED_BEATS = 4.0, 15.0, 3
_POLL_SECONDS = 0.5

_owned: dict[str, _Owner] = {}
_lock = threading.Lock()


class FolderInUseError(OSError):
    """Another process that still runs keeps its state in a folder."""


def claim(
    folder: str | os.PathLike[str], owner: str, argument: str, job: str | None = None
) -> None:
    """Makes this process the owner of a folder, creating the folder if necessary.

    Args:
        argument: Name of the argument by which the user gave the folder, for messages.
        job: Secret or number that this job alone has, over all of its starts; None for none.

    Raises:
        FolderInUseError: If another process is, and still runs.
        OSError: If the folder cannot be written.
    """
    path = _key(folder)
    with _lock:
        if path in _owned:
            _owned[path].check()
            _owned[path].write()  # Somebody may have deleted the folder.
            return
        own = _Owner(path, owner, argument, job)
        own.take()
        _owned[path] = own


def check(folder: str | os.PathLike[str]) -> None:
    """Sees that a folder which this process has claimed is still its own.

    Raises:
        FolderInUseError: If another process has taken it, as this one seemed to have ended.
    """
    own = _owned.get(_key(folder))
    if own is not None:
        own.check()


def release(folder: str | os.PathLike[str]) -> None:
    """Gives a folder up, if this process has claimed it."""
    with _lock:
        own = _owned.pop(_key(folder), None)
    if own is not None:
        own.release()


class _Owner:
    """This process as the owner of a folder."""

    def __init__(self, folder: str, owner: str, argument: str, job: str | None) -> None:
        self._folder, self._argument = folder, argument
        self._path = f"{folder.rstrip('/')}/{FILE}"
        self._facts: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "owner": owner,
            "host": socket.gethostname(),
            "machine": process_identity.machine(),
            "process": os.getpid(),
            "birth": process_identity.birth_of(os.getpid()),
            "job": None if job is None else hashlib.sha256(job.encode()).hexdigest()[:16],
            "beat": 0,
        }
        self._made_folder = not tf.io.gfile.exists(folder)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="folder-owner", daemon=True)

    def take(self) -> None:
        """Writes this process's name, once nobody else's counts."""
        tf.io.gfile.makedirs(self._folder)
        seen = self._read()
        if seen is not None and self._may_run_elsewhere(seen):
            self._wait_for_beat(seen)
        with _locked(self._folder):
            now = self._read()
            if now is not None and not _has_ended_here(now):
                is_same = seen is not None and now["id"] == seen["id"]
                if not is_same or now["machine"] == process_identity.machine():
                    raise self._in_use(now)
            self.write()
        self._thread.start()

    def check(self) -> None:
        """Raises FolderInUseError if another process has taken the folder."""
        now = self._read()
        if now is not None and now["id"] != self._facts["id"]:
            raise self._in_use(now)

    def release(self) -> None:
        """Stops the heartbeat, and removes this process's name and a folder it created."""
        self._ends.set()
        self._thread.join()
        with contextlib.suppress(OSError, tf.errors.OpError, ValueError):
            now = self._read()
            if now is not None and now["id"] == self._facts["id"]:
                tf.io.gfile.remove(self._path)
            if self._made_folder and "://" not in self._folder:
                os.rmdir(self._folder)  # Only if nothing is in it.

    def _beat(self) -> None:
        seconds = _beat_seconds(self._folder)
        while not self._ends.wait(seconds):
            # A fault of the disk is reported when a state is written to it.
            with contextlib.suppress(OSError, tf.errors.OpError, ValueError):
                now = self._read()
                if now is None or now["id"] != self._facts["id"]:
                    continue
                self._facts["beat"] += 1
                self.write()

    def _may_run_elsewhere(self, seen: dict[str, Any]) -> bool:
        same_job = seen["job"] is not None and seen["job"] == self._facts["job"]
        return seen["machine"] != process_identity.machine() and not same_job

    def _wait_for_beat(self, seen: dict[str, Any]) -> None:
        """Raises FolderInUseError at the first sign of life of an owner on another machine."""
        seconds = _MISSED_BEATS * _beat_seconds(self._folder)
        logger.info(
            "waiting %g s to see whether %s on %s, which owns %s, still runs",
            seconds,
            seen["owner"],
            seen["host"],
            self._folder,
        )
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            now = self._read()
            if now is None:
                return
            if (now["id"], now["beat"]) != (seen["id"], seen["beat"]):
                raise self._in_use(now)

    def _read(self) -> dict[str, Any] | None:
        """Facts about the owner; None if there is none, or its file is invalid."""
        try:
            with tf.io.gfile.GFile(self._path, "rb") as file:
                facts = json.loads(file.read())
        except (tf.errors.NotFoundError, ValueError):
            return None
        return facts if isinstance(facts, dict) and self._facts.keys() <= facts.keys() else None

    def write(self) -> None:
        """Writes this process's name and number of beats."""
        tf.io.gfile.makedirs(self._folder)
        # An owner does not outlive its machine, whose disk need not have this.
        replace(self._path, json.dumps(self._facts).encode(), is_durable=False)

    def _in_use(self, facts: dict[str, Any]) -> FolderInUseError:
        return FolderInUseError(
            f"{facts['owner']} of another job (process {facts['process']} on {facts['host']}) "
            f"keeps its state in {self._folder}, and still runs. Give each job a folder of its "
            "own, or wait until that one has ended. "
            f"Received: {self._argument}={self._folder!r}"
        )


def _has_ended_here(facts: dict[str, Any]) -> bool:
    """Whether an owner was a process of this machine that runs no more."""
    if facts["machine"] != process_identity.machine():
        return False
    state = process_identity.state_of(facts["process"], facts["birth"])
    return state == process_identity.ENDED


def _beat_seconds(folder: str) -> float:
    return _REMOTE_BEAT_SECONDS if "://" in folder else _BEAT_SECONDS


def _key(folder: str | os.PathLike[str]) -> str:
    path = os.fspath(folder)
    return path if "://" in path else os.path.realpath(path)


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Context in which no other process takes a folder, where the file system has locks."""
    handle: Any = None
    try:
        with contextlib.suppress(OSError, ImportError):
            import fcntl

            if "://" not in folder:
                handle = os.open(folder, os.O_RDONLY)
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        if handle is not None:
            os.close(handle)
