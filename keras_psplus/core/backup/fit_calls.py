"""Calls of `fit` in one script with the same backup folder.

A backup belongs to one of them.

A script that is started again makes the same calls. One of them finds the backup of another: a
call that had ended before is not trained again, and takes nothing from a later one's.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import inspect
import os
import shutil
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keras_psplus.cluster.environment import RESTART_VARIABLE, TOKEN_VARIABLE
from keras_psplus.cluster.process import signals
from keras_psplus.core import seeds
from keras_psplus.core.base import optimizers
from keras_psplus.core.jobs import failure
from keras_psplus.files import ownership
from keras_psplus.files.replace import sync

if TYPE_CHECKING:
    import keras


# What a call does with the backup that it finds.
RESUME, PASS, AGAIN, FRESH = "resume", "pass over", "train without backups", "begin afresh"
_ARGUMENTS = "epochs", "initial_epoch", "batch_size", "steps_per_epoch"


@dataclasses.dataclass
class FitCall:
    """One call of `fit`.

    Attributes:
        number: Its number among those with this folder, from 1; those that failed do not count.
        model: The number of its model among theirs.
        arguments: Arguments by which calls are told apart, a dict.
        random: State of `data_seeds` when it began.
        history: Epochs and logs of a call that has ended, or None.
        has_ended: Whether it has ended well.
        optimizer: Function that returns the model's optimizer of then, or None if it is gone.
    """

    number: int
    model: int
    arguments: dict[str, Any]
    random: Any
    history: Any = None
    has_ended: bool = False
    optimizer: Callable[[], Any] = lambda: None

    def facts(self) -> dict[str, Any]:
        """Facts about the call for backups of later calls."""
        return {"model": self.model, "arguments": self.arguments, "history": self.history}


class FitCalls:
    """The calls of `fit` with one folder, in this process."""

    def __init__(self) -> None:
        self._calls: list[FitCall] = []
        self._models: list[Callable[[], Any]] = []

    def begin(self, model: keras.Model, arguments: dict[str, Any]) -> FitCall:
        """Begins a call, in the place of the one before if that has failed."""
        if self._calls and not self._calls[-1].has_ended:
            self._calls.pop()
        number = next((i for i, one in enumerate(self._models) if one() is model), None)
        if number is None:
            number = len(self._models)
            self._models.append(weakref.ref(model))
        call = FitCall(len(self._calls) + 1, number, arguments, seeds.state())
        if model.optimizer is not None:
            call.optimizer = weakref.ref(model.optimizer)
        self._calls.append(call)
        return call

    def decide(self, call: FitCall, facts: dict[str, Any]) -> str:
        """Decides what a call does with a backup.

        Args:
            call: The call, the last that has begun. It gets the number of the backup's if the
                script has left out the calls before.
            facts: Facts of the backup's `TrainingState`.

        Returns:
            `RESUME`, `PASS`, `AGAIN` or `FRESH`.
        """
        saved = facts["calls"]
        number = len(saved)
        if number == call.number:
            return RESUME
        if number > call.number:
            own, last = saved[call.number - 1], saved[-1]
            if own["arguments"] != call.arguments == last["arguments"]:
                self._skip_to(call, saved)
                return RESUME
            return PASS if own["model"] == last["model"] else AGAIN
        # The backup is of a call that has ended in this process, and was kept.
        before = self._calls[number - 1]
        goes_on = facts["epoch"] < call.arguments["epochs"]
        is_next = before.model != call.model or before.optimizer() is call.optimizer()
        return RESUME if goes_on and is_next else FRESH

    def facts_of(self, call: FitCall) -> list[dict[str, Any]]:
        """Facts of a call and of all before it."""
        return [one.facts() for one in self._calls[: call.number]]

    def _skip_to(self, call: FitCall, saved: list[dict[str, Any]]) -> None:
        before = [
            FitCall(i + 1, one["model"], one["arguments"], None, one["history"], True)
            for i, one in enumerate(saved[:-1])
        ]
        self._calls, call.number = [*before, call], len(saved)


def calls_of_folder(folder: str | os.PathLike[str]) -> FitCalls:
    path = os.fspath(folder)
    return _BY_FOLDER.setdefault(path if "://" in path else os.path.realpath(path), FitCalls())


def arguments_of(
    fit: Callable[..., Any], model: keras.Model, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call of `fit`, by which it is told from others.

    Raises:
        TypeError: If they are not those of `fit`.
    """
    bound = inspect.signature(fit).bind(model, *args, **kwargs)
    bound.apply_defaults()
    found = {name: bound.arguments.get(name) for name in _ARGUMENTS}
    found = {k: v if v is None or isinstance(v, int) else f"{v}" for k, v in found.items()}
    kinds = [type(one).__name__ for one in optimizers.optimizers_of(model).values()]
    return {**found, "optimizers": kinds, "trainable": len(model.trainable_variables)}


_BY_FOLDER: dict[str, FitCalls] = {}


# Backup of a `fit` that has ended, kept until the script has ended well.
#
# Keras deletes a backup at the end of `fit`. What comes after may fail, and a launcher starts the
# script again: it would train everything once more. So the folder is renamed to a hidden one beside
# it, which the next start of the same job takes back. Where nothing starts a job again, it is
# deleted at once.


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
        sync(os.path.dirname(path))
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
        signals.watch()
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
    if signals.is_bad() or failure.has_failed() or failure.has_lost_tasks():
        return
    for kept in _kept:
        _remove(kept)
