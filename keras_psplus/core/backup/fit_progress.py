"""Progress of a call of `fit`, and its restoration when a job resumes."""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from keras_psplus.core import data_position, seeds
from keras_psplus.core.backup import backup_files, fit_calls, training_state
from keras_psplus.core.backup.backup_files import TRAINING
from keras_psplus.core.backup.training_state import TrainingState
from keras_psplus.core.base import optimizers
from keras_psplus.files import ownership
from keras_psplus.keras_internals.keras_parts import callbacks as keras_callbacks
from keras_psplus.keras_internals.keras_parts import file_utils

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
        call: On the chief, the `fit_calls.FitCall` of a `fit` with a BackupAndRestore, else None.
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
        self.call: fit_calls.FitCall | None = None
        self.is_saving = True
        self.passed: dict[str, Any] | None = None
        self.folders: list[str] = []
        # What is to be done with the backup that was there, as far as it is known.
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
                self.folders.append(backup.backup_dir)
                calls = fit_calls.calls_of_folder(backup.backup_dir)
                arguments = fit_calls.arguments_of(fit, model, args, kwargs)
                self.call = call = calls.begin(model, arguments)
                self._saved_seed = self._seed_of(call, backup)

    def resume(self, resumed: Resumed) -> None:
        """Training is to go on where a state says, which the model has been given."""
        self.resumed = resumed
        facts = resumed.facts
        self.epoch, self.batch, self.first_epoch = (
            facts[name] for name in ("epoch", "batch", "first_epoch")
        )

    def _seed_of(
        self, call: fit_calls.FitCall, backup: keras.callbacks.BackupAndRestore
    ) -> int | None:
        """Seed of the data in a backup; None if there is none for this call."""
        # What is wrong is said when the model is restored, on all workers.
        with contextlib.suppress(Exception):
            backup_files.take(backup, self.owner)
            facts = TrainingState.read(backup.backup_dir).facts
            self._found = fit_calls.calls_of_folder(backup.backup_dir).decide(call, facts)
            if self._found == fit_calls.RESUME:
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

    # What callbacks see.

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
            file_utils.exists(file_utils.join(b.backup_dir, TRAINING)) for b in backups
        )
        if self._found in (fit_calls.FRESH, fit_calls.AGAIN):
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

    # What is saved.

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
            position["calls"] = fit_calls.calls_of_folder(backup_dir).facts_of(self.call)
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
