"""Files of each worker's state beside a backup or a snapshot.

They hold the state of compressors and of `updates`, and rows that were read ahead. Residuals and
accumulated gradients differ from worker to worker, and state that is equal on all workers
(PowerSGD's factors, counters of batches) has to stay equal: either all workers resume with their
state, or none does.

Every worker's file is written before the job's state that it belongs to is committed, and no file
is removed that a state needs. A state lists the names and the digests of its files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.files import atomic, digests
from keras_psplus.keras_internals.keras_parts import file_utils
from keras_psplus.log import logger

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


class WorkerFiles:
    """The files of a strategy's workers.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy

    def save(
        self,
        model: keras.Model,
        folder: str,
        what: str,
        names_in_use: Callable[[], Collection[str] | None],
        make_folder: Callable[[str], Any] | None = None,
        waits: bool = False,
    ) -> dict[str, str] | None:
        """Writes what every worker keeps; when this returns, all workers have written theirs.

        Args:
            model: The model.
            folder: The folder of what is saved, on this worker.
            what: Its kind, for messages.
            names_in_use: Function without arguments that is called on the chief and returns the
                names of the files that are needed as long as the new ones do not count, or None
                if it is not known.
            make_folder: Function that makes the folder of workers' files, by its path; by default
                `tf.io.gfile.makedirs`.
            waits: Whether workers wait for each other even if they keep nothing.

        Returns:
            Dict from the names of all workers' files to their digests. None if a worker cannot be
            reached: the job may be about to be started again, and would go on without what that
            worker keeps.

        Raises:
            OSError: If a worker cannot write; on all workers.
            PeerLostError: If another worker is gone.
        """
        raise NotImplementedError

    def problems(self, folder: str, saved: Sequence[dict[str, str]]) -> list[list[str]]:
        """Checks the workers' files of some states; on all workers.

        Args:
            folder: The folder of what is saved, on this worker.
            saved: List of dicts as `save` has returned them.

        Returns:
            List of lists of texts, one list for each state.
        """
        raise NotImplementedError

    def restore(
        self, model: keras.Model, folder: str, files: dict[str, str], problems: Sequence[str]
    ) -> None:
        """Reads what `save` has written, on all workers or on none.

        Args:
            model: The model, as the chief has restored it.
            folder: The folder of what is saved, on this worker.
            files: What `save` has returned.
            problems: What is wrong with them, on any worker.
        """
        if problems:
            warn_lost("; ".join(problems), folder_in(folder))
        else:
            self._read(model, folder, files)

    def delete(self, folder: str) -> None:
        """Deletes this worker's files."""

    def _read(self, model: keras.Model, folder: str, files: dict[str, str]) -> None:
        raise NotImplementedError

    def _problem(self, folder: str, error: Exception) -> str:
        task = self._strategy.task.name if self._strategy.task else "this process"
        reason = getattr(error, "message", None) or f"{error}"
        return f"{task} cannot write to {folder}: {reason}"


def digests_of(names: Iterable[str], folder: str) -> dict[str, str]:
    """Digests of files by their names, which the disk has when this returns."""
    found = {}
    for name in names:
        path = file_utils.join(folder_in(folder), name)
        atomic.sync(path)
        found[name] = digests.digest_of_file(path)
    return found


def problems_of(files: dict[str, str], folder: str) -> list[str]:
    """Checks files against their digests; returns a list of error texts."""
    place = folder_in(folder)
    found = (digests.problem_of(file_utils.join(place, name), d) for name, d in files.items())
    return [problem for problem in found if problem]


def warn_lost(why: str, where: str) -> None:
    """Says that all workers begin with nothing kept."""
    logger.warning(
        "what compressors had left out, accumulated gradients and rows read ahead before the last "
        "backup are lost: %s. Training goes on with none of it. Received: %s",
        why,
        where,
    )


def number_of_steps(model: keras.Model) -> int:
    """A number that grows with every step of any optimizer."""
    return sum(int(optimizer.iterations.numpy()) for optimizer in optimizers_of(model).values())


def folder_in(folder: str) -> str:
    """Subfolder of a backup that holds the worker files."""
    return file_utils.join(folder, "compression")


def remove(names: Iterable[str], folder: str) -> None:
    """Removes files of the workers by their names."""
    for name in names:
        path = file_utils.join(folder_in(folder), name)
        if file_utils.isdir(path):
            file_utils.rmtree(path)
        elif file_utils.exists(path):
            file_utils.remove(path)
