"""Files of each worker's state beside a backup.

Residuals and accumulated gradients differ from worker to worker, and state that is equal on all
workers (PowerSGD's factors, counters of batches) has to stay equal: either all workers resume with
their state, or none does.

1. Every process that has state writes one file, under a number that no file of its has.
2. All of them wait until all have written.
3. The chief commits the job's state, which lists the names and the digests of these files.
4. The next save removes files that no state needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import zipfile
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.files import integrity
from keras_psplus.files.integrity import open_file
from keras_psplus.files.replace import sync
from keras_psplus.keras_internals.keras_parts import file_utils
from keras_psplus.log import logger

if TYPE_CHECKING:
    import keras

    from keras_psplus.core.worker_state import WorkerState


# File of named arrays: a ZIP archive with one `.npy` entry for each.


_ENDING = ".npy"


def write(path: str | os.PathLike[str], arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes arrays one after the other, of which memory holds one at a time."""
    with tf.io.gfile.GFile(os.fspath(path), "wb") as file:
        stream: Any = _Stream(file)
        with zipfile.ZipFile(stream, "w") as archive:
            for name, array in arrays:
                with archive.open(name + _ENDING, "w", force_zip64=True) as part:
                    np.lib.format.write_array(part, np.asarray(array, order="C"))


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads a file of `write`.

    bfloat16 comes back as its bytes, as in all of NumPy's files.
    """
    found = {}
    with open_file(path) as file, zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            with archive.open(name) as part:
                found[name.removesuffix(_ENDING)] = np.lib.format.read_array(part)
    return found


class _Stream:
    """Sequential file without seeking, all that TensorFlow's files support."""

    def __init__(self, file: tf.io.gfile.GFile) -> None:
        self._file, self.flush = file, file.flush

    def write(self, data: bytes) -> int:
        self._file.write(bytes(data))
        return len(data)


_FILE_ERRORS = OSError, tf.errors.OpError
_EXCHANGE = "worker state"
# Grace period: the launcher may still be ending this job.
_UNREACHABLE_SECONDS = 60.0


class WorkerFiles:
    def __init__(self, strategy: tf.distribute.Strategy, state: WorkerState) -> None:
        self._strategy, self._state = strategy, state
        self._unreachable_since: float | None = None

    def save(
        self,
        model: keras.Model,
        folder: str,
        what: str,
        names_in_use: Callable[[], Collection[str] | None],
        waits: bool = False,
    ) -> dict[str, str] | None:
        """Writes what every worker keeps; when this returns, all workers have written theirs.

        Args:
            folder: The folder of what is saved, on this worker.
            names_in_use: Function without arguments that is called on the chief and returns the
                names of the files that are needed as long as the new ones do not count, or None
                if it is not known.
            waits: Whether workers wait for each other even if they keep nothing.

        Returns:
            Dict from the names of all workers' files to their digests. None if a worker cannot be
            reached: the job may be about to be started again, and would go on without what that
            worker keeps.

        Raises:
            OSError: If a worker cannot write; on all workers.
            PeerLostError: If another worker is gone.
        """
        state, problem = self._state, ""
        files: dict[str, str] = {}
        lost: list[int] = []
        state.finish_steps()
        if not state.has_any and not waits:
            return {}
        if state.has_any:
            try:
                files = self._write(model, folder, lost)
            except _FILE_ERRORS as error:
                problem = self._problem(folder, error)
            if self._is_too_early(lost):
                _remove(files, folder)
                logger.warning(
                    "nothing is saved now, as worker-%d cannot be reached, and what it has left "
                    "out of its gradients would be missing; what was saved before stays",
                    lost[0],
                )
                return None
            for unit in lost:
                state.warn_lost(unit)
        in_use = names_in_use() if self._strategy.is_chief else None
        listed = None if in_use is None else list(in_use)
        answers: list[dict[str, Any]] = [{"problem": problem, "files": files, "in_use": listed}]
        if state.control is not None:
            texts = state.control.exchange(what, json.dumps(answers[0]))
            answers = [json.loads(text) for text in texts]
        problem = next((one["problem"] for one in answers if one["problem"]), "")
        if problem:
            _remove(files, folder)
            raise OSError(problem)
        in_use = answers[0]["in_use"]
        if state.has_any and in_use is not None:
            _remove(set(self._files(folder)).difference(files, in_use), folder)
        return {name: digest for one in answers for name, digest in one["files"].items()}

    def problems(self, folder: str, saved: Sequence[dict[str, str]]) -> list[list[str]]:
        """Checks the workers' files of some states; on all workers.

        Args:
            saved: List of dicts as `save` has returned them.

        Returns:
            List of lists of texts, one list for each state.
        """
        if not self._state.may_keep:
            return [[] for _ in saved]
        found = [self._problems_of(folder, files) for files in saved]
        control = self._state.control
        if control is None:
            return found
        answers = control.exchange(_EXCHANGE, json.dumps(found))
        return [sum(of_state, []) for of_state in zip(*map(json.loads, answers))]

    def restore(
        self, model: keras.Model, folder: str, files: dict[str, str], problems: Sequence[str]
    ) -> None:
        """Reads what `save` has written, on all workers or on none.

        Args:
            model: The model, as the chief has restored it.
            files: What `save` has returned.
            problems: What is wrong with them, on any worker.
        """
        state = self._state
        state.finish_steps()
        if problems:
            _warn_lost("; ".join(problems), folder)
        elif not files and state.has_any:
            _warn_lost("it has no files of workers", folder)
        elif files and state.may_keep:
            (name,) = self._own(files)
            arrays = read(file_utils.join(_folder_in(folder), name))
            for owner_name, owner in state.owners(model).items():
                state.assign(owner, state.by_unit(owner_name, arrays), is_strict=False)

    def delete(self, folder: str) -> None:
        """Deletes this worker's files."""
        _remove(self._files(folder), folder)

    def _write(self, model: keras.Model, folder: str, lost: list[int]) -> dict[str, str]:
        """Writes this process's file; returns its digest by its name."""
        tf.io.gfile.makedirs(_folder_in(folder))
        used, number = set(self._files(folder).values()), _number_of_steps(model)
        while number in used:
            # Of a state that counts, or of one that was never written to its end.
            number += 1
        name = f"{self._state.layout}-step-{number:010d}.zip"
        path = file_utils.join(_folder_in(folder), name)
        try:
            write(f"{path}.tmp", self._state.entries(self._state.owners(model), lost))
            tf.io.gfile.rename(f"{path}.tmp", path)
            # The disk has it when this returns.
            sync(path)
            return {name: integrity.digest_of_file(path)}
        except _FILE_ERRORS:
            _remove((name, f"{name}.tmp"), folder)
            raise

    def _problems_of(self, folder: str, files: dict[str, str]) -> list[str]:
        """Errors of this worker's file for a state."""
        own = self._own(files)
        if files and not own:
            return [f"there is no file of {self._state.layout}"]
        paths = {file_utils.join(_folder_in(folder), name): files[name] for name in own}
        found = (integrity.problem_of(path, digest) for path, digest in paths.items())
        return [problem for problem in found if problem]

    def _own(self, files: Iterable[str]) -> list[str]:
        return [name for name in files if name.startswith(f"{self._state.layout}-step-")]

    def _files(self, folder: str) -> dict[str, int]:
        """Files to replace, also those that were not written to their end, and their numbers."""
        if not file_utils.exists(_folder_in(folder)):
            return {}
        # On a disk that workers share, each of them knows its own alone.
        layout = ".+" if self._state.control is None else re.escape(self._state.layout)
        pattern = re.compile(rf"{layout}-step-(\d+)\.zip(\.tmp)?")
        names = file_utils.listdir(_folder_in(folder))
        matches = [(name, pattern.fullmatch(name)) for name in names]
        return {name: int(match[1]) for name, match in matches if match}

    def _is_too_early(self, lost: list[int]) -> bool:
        """Whether to wait for workers that cannot be reached rather than go on without them."""
        if not lost:
            self._unreachable_since = None
            return False
        self._unreachable_since = self._unreachable_since or time.monotonic()
        return time.monotonic() - self._unreachable_since < _UNREACHABLE_SECONDS

    def _problem(self, folder: str, error: Exception) -> str:
        task = self._strategy.task.name if self._strategy.task else "this process"
        reason = getattr(error, "message", None) or f"{error}"
        return f"{task} cannot write to {folder}: {reason}"


def _warn_lost(why: str, folder: str) -> None:
    """Says that all workers begin with nothing kept."""
    logger.warning(
        "what compressors had left out, accumulated gradients and rows read ahead before the last "
        "backup are lost: %s. Training goes on with none of it. Received: %s",
        why,
        _folder_in(folder),
    )


def _number_of_steps(model: keras.Model) -> int:
    return sum(int(optimizer.iterations.numpy()) for optimizer in optimizers_of(model).values())


def _folder_in(folder: str) -> str:
    """Subfolder of a backup that holds the worker files."""
    path: str = file_utils.join(folder, "compression")
    return path


def _remove(names: Iterable[str], folder: str) -> None:
    """Removes files of workers by their names; one that cannot be removed does no harm."""
    with contextlib.suppress(*_FILE_ERRORS):
        for name in names:
            path = file_utils.join(_folder_in(folder), name)
            if file_utils.exists(path):
                file_utils.remove(path)
