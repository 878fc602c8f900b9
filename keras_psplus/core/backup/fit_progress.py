"""Progress of a call of `fit`, and its restoration when a job resumes."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from keras_psplus.core import data_position, seeds
from keras_psplus.core.backup import store, training_state
from keras_psplus.core.backup.training_state import TrainingState
from keras_psplus.core.base import optimizers
from keras_psplus.files import ownership
from keras_psplus.keras_internals.keras_parts import callbacks as keras_callbacks

if TYPE_CHECKING:
    import keras

    from keras_psplus.core.backup.training_state import Resumed


class FitProgress:
    """The place of a strategy's present `fit` in its epochs and data.

    Args:
        owner: Name of this process, as the owner of a backup's folder.

    Attributes:
        epoch, batch: The present epoch, and its batches that are done.
        first_epoch: The first epoch of this `fit`, whether it was in this process or not.
        resumed: What a backup says, from when it was read until the training goes on.
        has_resumed: Whether the present epoch was begun before.
        call: On the chief, the `FitCall` of a `fit` with a BackupAndRestore, else None.
        is_saving: Whether BackupAndRestore saves: not in a call that has ended before.
        passed: What is to be had of this call, which is passed over, or None.
        folders: Folders of which this process is the owner.
        optimizers: Those that steps have built.
    """

    def __init__(self, owner: str = "a process") -> None:
        self.owner = owner
        self.epoch = self.batch = 0
        self.first_epoch: int | None = None
        self.resumed: Resumed | None = None
        self.has_resumed = False
        self.call: FitCall | None = None
        self.is_saving = True
        self.passed: dict[str, Any] | None = None
        self.folders: list[str] = []
        # Decision on the backup that was there, as far as it is known.
        self._found: str | None = None
        self.optimizers: list[keras.optimizers.Optimizer] = []
        self._layout: dict[str, Any] | None = None
        self._callbacks: Sequence[keras.callbacks.Callback] | None = None
        self._due: list[Callable[[], None]] | None = None
        self._skips: tuple[int, int, Any] | None = None
        self._iterator: Callable[[], Any] | None = None
        # Of the data that the next iterator reads, if it is that of `fit`.
        self._awaits_data = False
        self._saved_seed: int | None = None
        self._seed: int | None = None
        self._initial_epoch: Any = None

    # Before anything is trained.

    def begin(
        self,
        fit: Callable[..., Any],
        model: keras.Model,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_chief: bool,
    ) -> None:
        """Starts tracking a call of `fit`, whose data keep the order of the first run."""
        self._awaits_data, self._initial_epoch = True, model._initial_epoch
        if not is_chief:
            return
        with contextlib.suppress(TypeError):
            given = inspect.signature(fit).bind_partial(model, *args, **kwargs).arguments
            self.epoch = given.get("initial_epoch", 0)
            callbacks = given.get("callbacks")
            for backup in _backups(getattr(callbacks, "callbacks", callbacks)):
                folder = os.fspath(backup.backup_dir)
                self.folders.append(folder)
                arguments = arguments_of(fit, model, args, kwargs)
                self.call = call = calls_of_folder(folder).begin(model, arguments)
                self._saved_seed = self._seed_of(call, folder)

    def resume(self, resumed: Resumed) -> None:
        """Training is to go on where a state says, which the model has been given."""
        self.resumed = resumed
        facts = resumed.facts
        self.epoch, self.batch, self.first_epoch = (
            facts[name] for name in ("epoch", "batch", "first_epoch")
        )

    def _seed_of(self, call: FitCall, folder: str) -> int | None:
        """Seed of the data in a backup; None if there is none for this call."""
        # Faults are reported when the model is restored, on all workers.
        with contextlib.suppress(Exception):
            store.take(folder, self.owner)
            if (path := store.path_of_training(folder)) is not None:
                facts = TrainingState.read(path).facts
                self._found = calls_of_folder(folder).decide(call, facts)
                if self._found == RESUME:
                    seed: int | None = facts["data_seed"]
                    return seed
        return None

    def pass_over(self, model: keras.Model, passed: dict[str, Any]) -> None:
        """Trains nothing: this call had ended before the backup was made, of a later one.

        Args:
            passed: Dict of the call's `history`, and of the state of `data_seeds` after it.
        """
        self.is_saving, self.passed = False, passed
        model._initial_epoch = sys.maxsize

    def release_folders(self) -> None:
        """Gives up the folders of backups, when all is written."""
        for folder in self.folders:
            ownership.release(folder)

    def end(self, model: keras.Model) -> None:
        """It has ended, well or not; the next one begins where its script says."""
        model._initial_epoch = self._initial_epoch
        if self.passed is not None and self.passed["random"] is not None:
            seeds.restore(self.passed["random"])

    def data_seed(self, drawn: int) -> int:
        """The seed of the order of data that are about to be read.

        Args:
            drawn: The one that they get without a backup.
        """
        awaited, self._awaits_data = self._awaits_data, False
        return self._saved_seed if awaited and self._saved_seed is not None else drawn

    def note_data_seed(self, seed: int) -> None:
        """Notes the seed that the data of all workers got."""
        if self._seed is None:
            self._seed = seed

    # Training as callbacks see it.

    @contextlib.contextmanager
    def beginning(self, callbacks: keras.callbacks.CallbackList) -> Iterator[None]:
        """Context in which callbacks hear of the beginning of training, and the model is restored.

        Raises:
            ValueError: If `save_freq` cannot be.
        """
        self._callbacks, model = callbacks.callbacks, callbacks._model
        backups = _backups(self._callbacks)
        for backup in backups:
            _check_frequency(backup)
        resumes = self.resumed is not None or any(
            store.path_of_training(os.fspath(backup.backup_dir)) for backup in backups
        )
        if self._found in (FRESH, AGAIN):
            resumes = False
        kept = training_state.keep_files(self._callbacks) if resumes else []
        try:
            yield
        finally:
            for callback in kept:
                callback.append = False
        if self.resumed is not None:
            self._restore_callbacks()
            if self.resumed.facts["stops"]:
                # A callback had ended the training.
                model._initial_epoch = sys.maxsize
        if self.passed is not None and self.passed["history"] is not None:
            model.history.epoch, model.history.history = self.passed["history"]

    def begin_epoch(self, model: keras.Model, epoch: int) -> None:
        """An epoch begins, and callbacks have heard of it."""
        # Also for a `fit` that is broken off, and called again.
        model._initial_epoch = self._initial_epoch
        self.epoch, self.batch, self.has_resumed = epoch, 0, False
        resumed, self.resumed = self.resumed, None
        for backup in self.backups:
            backup._current_epoch = epoch
        if resumed is not None:
            self.first_epoch = resumed.facts["first_epoch"]
            self.batch = resumed.facts["batch"]
            self._skips = epoch - self.first_epoch, self.batch, resumed.facts["data"]
            self._layout = resumed.facts["layout"]
            if self.batch:
                # Callbacks had heard of its beginning before, and may have acted on it again.
                self.has_resumed = True
                resumed.assign(model)
                self.resumed = resumed
                self._restore_callbacks()
                self.resumed = None
        elif self.first_epoch is None:
            self.first_epoch = epoch

    def begin_iteration(self, iterator: Any) -> tuple[int, int, Any] | None:
        """Keras begins to iterate over data, the first time over those of `fit`.

        Returns:
            How many epochs and batches of them come before, and what else a backup has said of
            their position; or None if there are none.

        Raises:
            ValueError: If training is to go on in the middle of an epoch of other batches.
        """
        if self._iterator is None:
            self._iterator = weakref.ref(iterator)
        layout, self._layout = self._layout, None
        if layout is not None:
            data_position.check(iterator, layout, self.epoch, self.batch)
        skips, self._skips = self._skips, None
        return skips

    @property
    def iterator(self) -> Any:
        """Keras's epoch iterator over the data of `fit`, or None."""
        return None if self._iterator is None else self._iterator()

    def check_optimizers(self, model: keras.Model) -> None:
        """Sees, after the first step, that a backup can have the optimizers that steps use.

        Raises:
            ValueError: If it would lack one.
        """
        built, self.optimizers = self.optimizers, []
        if built and self.backups:
            optimizers.check_reached(model, built)

    @property
    def at(self) -> str:
        """The place in the epochs, for people."""
        return f"after batch {self.batch} of epoch {self.epoch + 1}"

    @property
    def is_under_way(self) -> bool:
        """Whether a `fit` is under way that is not passed over."""
        return self.is_saving and self._callbacks is not None

    @property
    def can_save(self) -> bool:
        """Whether something of `fit` can be saved at any batch."""
        return self.is_saving and bool(self.backups)

    @property
    def backups(self) -> list[keras.callbacks.BackupAndRestore]:
        return _backups(self._callbacks or ())

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Context of a callback event, which defers saving until all callbacks have run.

        If one of them raises, nothing is saved: callbacks' states would be of different batches.
        """
        due: list[Callable[[], None]] = []
        self._due = due
        try:
            yield
        finally:
            self._due = None
        for save in due:
            save()

    def defer(self, save: Callable[[], None]) -> bool:
        """Has something saved when all callbacks have heard of an event; or returns False."""
        if self._due is None:
            return False
        self._due.append(save)
        return True

    # Saved state.

    def state(
        self,
        model: keras.Model,
        of_data: Any,
        backup_dir: str | None = None,
        has_value: Callable[[Any], bool] = lambda variable: True,
    ) -> TrainingState | None:
        """State of a model's `fit` to save; None outside of `fit`.

        Args:
            of_data: What is to be known of the position in the data, beside numbers of batches.
            backup_dir: The folder, of a BackupAndRestore.
            has_value: Function of a variable that tells whether its value belongs to the state.
        """
        if self._callbacks is None:
            return None
        position = {
            "epoch": self.epoch,
            "batch": self.batch,
            "first_epoch": self.epoch if self.first_epoch is None else self.first_epoch,
            "data_seed": self._seed,
            "data": of_data,
            "stops": bool(model.stop_training),
            "layout": None if self.iterator is None else data_position.layout_of(self.iterator),
        }
        if self.resumed is not None:
            # Nothing has been read of the data yet.
            position.update({name: self.resumed.facts[name] for name in ("data", "layout")})
        if self.call is not None and backup_dir is not None:
            position["calls"] = calls_of_folder(backup_dir).facts_of(self.call)
            position["random"] = self.call.random
        return TrainingState.of(model, self._callbacks, position, has_value)

    def _restore_callbacks(self) -> None:
        assert self.resumed is not None and self._callbacks is not None
        resumed = self.resumed
        training_state.restore(self._callbacks, resumed.facts["callbacks"], resumed.weights)


def _backups(callbacks: Any) -> list[keras.callbacks.BackupAndRestore]:
    if not isinstance(callbacks, (list, tuple)):
        callbacks = [callbacks]
    return [c for c in callbacks if isinstance(c, keras_callbacks.BackupAndRestore)]


def _check_frequency(backup: keras.callbacks.BackupAndRestore) -> None:
    frequency = backup.save_freq
    if frequency != "epoch" and (isinstance(frequency, bool) or frequency < 1):
        raise ValueError(
            'BackupAndRestore saves at the end of epochs (`save_freq="epoch"`), or every so many '
            f"batches, at least 1. Received: save_freq={frequency!r}"
        )


# Calls of `fit` in one script with the same backup folder.
#
# A backup belongs to one of them. A script that is started again makes the same calls. One of them
# finds the backup of another: a call that had ended before is not trained again, and takes nothing
# from a later one's.


# Decisions of a call on the backup that it finds.
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
