"""Snapshots: regular copies of a job's state at one step, in a folder.

The servers write their tables, the chief everything else of the same step, and then the list of the
contents, without which a snapshot is ignored.
"""

import contextlib
import os
import re
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_psplus import arguments
from keras_psplus.core.backup import ended_backups
from keras_psplus.files import ownership
from keras_psplus.hybrid.files import saving, shard_files, snapshot_folders
from keras_psplus.hybrid.files.table_files import LIST, read_list
from keras_psplus.hybrid.rpc.calls import TableServerError, TableServerLostError
from keras_psplus.hybrid.rpc.servers import Servers
from keras_psplus.hybrid.tables.registry import Tables
from keras_psplus.log import logger

_KEPT = 2
_PATTERN = "step-*"
_FOLDER = re.compile(r"step-(\d+)$")


def check_arguments(every: int | None, directory: str | os.PathLike[str] | None) -> int | None:
    """Checks what a user gives, and returns the number as an int, or None.

    Raises:
        ValueError: If there is but one of them, or it cannot be.
    """
    arguments.folder("snapshot_dir", directory)
    if (every is None) != (directory is None):
        raise ValueError(
            "`snapshot_every` and `snapshot_dir` go together: give both, or none. Received: "
            f"snapshot_every={every!r}, snapshot_dir={directory!r}"
        )
    return None if every is None else arguments.whole_number("snapshot_every", every, 1)


class Snapshots:
    """Snapshots of one job; methods that write and read are for the chief.

    Args:
        servers: `servers.Servers`.
        tables: `registry.Tables`.
        name: Task name of this process.
        directory: Folder for the snapshots' folders.
        every: Steps from one to the next.
    """

    def __init__(
        self,
        servers: Servers,
        tables: Tables,
        name: str,
        directory: str | os.PathLike[str],
        every: int,
    ) -> None:
        self._servers, self._tables, self._name = servers, tables, name
        self.directory, self.every = shard_files.full_path(directory), every
        # Held while one is written, or a server reads one.
        self.lock = threading.Lock()
        # Until training that would go on from the last one has come to its end.
        self.is_needed = True
        self._has_saved = False
        # By path: why one that cannot be read is passed over.
        self._damaged: dict[str, str] = {}

    def take(self) -> None:
        """Makes this process the owner of the folder, before anything in it is read.

        Raises:
            FolderInUseError: If another job's process is its owner.
            OSError: If it cannot be written.
        """
        with self._named(), shard_files.translate_file_errors("write", self.directory):
            ownership.claim(self.directory, self._name, "snapshot_dir", ended_backups.job())

    def check_writable(self) -> None:
        """Sees that all tasks can write, and says what else is in the folder.

        Raises:
            OSError: If the chief cannot.
            TableServerError: If a server cannot.
        """
        with self._named():
            shard_files.check_writable(self.directory, self._name)
            others = snapshot_folders.others(self.directory)
        if others:
            logger.warning("%s", others)
        self._servers.ask_all("check_directory", directory=self.directory)

    def save(self, step: int, facts: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        """Writes one, and then deletes old ones.

        Args:
            step: Number of the step.
            facts: Dict of what else is to be known of it.
            tensors: Dict from names to arrays, everything but the tables.

        Raises:
            FolderInUseError: If another job has taken the folder.
            OSError: If the chief cannot write.
            TableServerError: If a server cannot, or is lost.
        """
        ownership.check(self.directory)
        folder = snapshot_folders.unused(self.directory, step)
        stem = f"dense-{uuid.uuid4().hex[:12]}"

        def dense():
            with self._named(), shard_files.translate_file_errors("write", folder):
                shard_files.write(os.path.join(folder, stem), {}, _as_tensors(tensors))
            return {**facts, "step": step, "dense": stem}

        with self.lock:
            with self._named():
                snapshot_folders.claim(folder)
                if self._damaged.pop(folder, None) and snapshot_folders.is_own(folder):
                    # The servers remove the tables that no list has.
                    for path in shard_files.find(folder, "dense-*"):
                        shard_files.remove_tree(path)
                    shard_files.remove_tree(os.path.join(folder, LIST))
            # On separate disks, servers make theirs.
            self._servers.ask_all("claim_folder", directory=folder)
            saving.save(self._servers, self._tables.all, folder, dense)
            self._has_saved = True
            self._keep([os.path.basename(path) for path, _ in self.whole()[-_KEPT:]])

    def read_newest(
        self,
        whole: Sequence[tuple[str, dict[str, Any]]],
        read: Callable[[str, dict[str, Any]], Any],
        problems: Sequence[Sequence[str]],
    ) -> tuple[tuple[str, dict[str, Any]] | None, Any]:
        """Reads the newest readable snapshot, and logs newer ones that are damaged.

        Args:
            whole: The result of `whole`.
            read: Function of a folder and its list of contents.
            problems: For each of them, errors of the workers' files, as texts.

        Returns:
            The pair that `read` was given, and what it has returned; None and None if there is no
            snapshot.

        Raises:
            OSError: If there are snapshots, and none of them can be read.
            TableServerLostError: If a server is lost.
        """
        found = list(zip(whole, problems))[::-1]
        self._damaged.update((folder, "; ".join(lost)) for (folder, _), lost in found if lost)
        # An older one that is whole is better than a newer one without what workers have kept.
        for (folder, listed), _ in sorted(found, key=lambda one: bool(one[1])):
            self._damaged.pop(folder, None)
            try:
                result = read(folder, listed)
            except TableServerLostError:
                raise
            except (OSError, TableServerError) as error:
                self._damaged[folder] = f"{error}"
                continue
            if self._damaged:
                logger.warning(
                    "a snapshot is damaged or incomplete; training resumes from another one, of "
                    "step %d. Received: %s",
                    listed["step"],
                    "; ".join(self._damaged.values()),
                )
            return (folder, listed), result
        if self._damaged:
            raise OSError(
                f"No snapshot in {self.directory} can be read. Put the files back from a copy, or "
                "delete the folder to train from the beginning. "
                f"Received: {'; '.join(self._damaged.values())}"
            )
        return None, None

    def worker_files_in_use(self) -> list[str]:
        """Names of the workers' files that snapshots need."""
        return sorted({name for _, listed in self.whole() for name in listed["worker_files"]})

    def latest(self) -> tuple[str, dict[str, Any]] | None:
        """The folder of the last whole one and what is in it, or None."""
        whole = self.whole()
        return whole[-1] if whole else None

    def latest_of_this_job(self) -> tuple[str, dict[str, Any]] | None:
        """As `latest`, but None if another process has written it, whose updates were others."""
        return self.latest() if self._has_saved else None

    def whole(self) -> list[tuple[str, dict[str, Any]]]:
        """Folders and contents of all complete snapshots, in the order of their steps."""
        found = []
        for path in shard_files.find(self.directory, _PATTERN):
            if not _FOLDER.search(path) or path in self._damaged:
                continue
            try:
                listed = read_list(path)
            except ValueError as error:
                self._damaged[path] = f"{error}"
                continue
            if listed is not None and "training" not in listed:
                self._damaged[path] = f"{path} has no training state"
            elif listed is not None:
                found.append((path, listed))
        return sorted(found, key=lambda one: one[1]["step"])

    def load(
        self, folder: str, listed: dict[str, Any], forms: dict[str, str], strict: bool = True
    ) -> dict[str, np.ndarray]:
        """Has the servers read one, and reads what is the chief's.

        Args:
            folder: The snapshot's folder.
            listed: What is in it.
            forms: Dict from names of tensors to their dtypes.
            strict: Whether the tables' optimizers must be those that they had.

        Returns:
            Dict from names to arrays.

        Raises:
            OSError: If the chief cannot read.
            TableServerError: If a server cannot.
            ValueError: If the snapshot has other tables.
        """
        saving.load(self._servers, self._tables.all, folder, strict)
        path = os.path.join(folder, listed["dense"])
        with self._named(), shard_files.translate_file_errors("read", folder):
            return {
                name: shard_files.read_tensor(path, name, dtype) for name, dtype in forms.items()
            }

    def delete(self) -> None:
        """Deletes all snapshots and the workers' files, unless a job will resume from them.

        Only folders that this strategy has made are deleted.
        """
        if self.is_needed:
            return
        with contextlib.suppress(TableServerError):
            self._keep([])
        snapshot_folders.remove(os.path.join(self.directory, snapshot_folders.STATES))
        ownership.release(self.directory)
        left = [folder for folder, _ in self.whole()]
        if left:
            logger.warning(
                "a start of the same script will resume from what is in %s, which has no file %s "
                "and so is not deleted: delete or move it. Received: %s",
                self.directory,
                snapshot_folders.MARKER,
                ", ".join(left),
            )

    def request_of(self, folder: str) -> dict[str, Any]:
        """Request to a server to read its rows of a snapshot."""
        return saving.request_of(self._tables.all, folder, strict=True)

    def _keep(self, names):
        snapshot_folders.keep_only(self.directory, names)
        # A separate disk may be full of what only the server sees.
        self._servers.ask_all("keep_folders", directory=self.directory, names=names)

    @contextlib.contextmanager
    def _named(self):
        try:
            yield
        except ownership.FolderInUseError:
            raise
        except OSError as error:
            raise OSError(f"{self._name} {error}") from None


def _as_tensors(arrays):
    with tf.device("/CPU:0"):
        return {name: tf.convert_to_tensor(array) for name, array in arrays.items()}
