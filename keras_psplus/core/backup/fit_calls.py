"""Calls of `fit` in one script with the same backup folder.

A backup belongs to one of them.

A script that is started again makes the same calls. One of them finds the backup of another: a
call that had ended before is not trained again, and takes nothing from a later one's.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keras_psplus.core.base import optimizers
from keras_psplus.core.data import data_seeds

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
        call = FitCall(len(self._calls) + 1, number, arguments, data_seeds.state())
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
    """The calls with a folder."""
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
