"""Base engine of every strategy, also where one replica trains alone."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.callbacks import step_report
from keras_psplus.cluster import roles
from keras_psplus.core.backup import backup_callback
from keras_psplus.core.backup.backup_tables import BackupTables
from keras_psplus.core.backup.fit_progress import FitProgress
from keras_psplus.core.base.background_writer import BackgroundWriter
from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.core.data import data_position, unknown_length
from keras_psplus.core.jobs import epoch_votes
from keras_psplus.core.jobs.preemption import Preemption
from keras_psplus.core.models import model_saving
from keras_psplus.core.models.building import lifted
from keras_psplus.core.plan import plan_request
from keras_psplus.core.state.worker_files import WorkerFiles
from keras_psplus.engine import Engine, Original
from keras_psplus.keras_internals.keras_parts import stateless_scope

if TYPE_CHECKING:
    import keras

    from keras_psplus.core.jobs.control import ControlPlane
    from keras_psplus.core.state.worker_state import WorkerState


class StrategyEngine(Engine):
    """Backups that survive a kill, epochs as long as their data, and variables as numbers."""

    # Whether each process that trains has the weights, or is far from some of them.
    has_weights_in_memory = False

    def __init__(self, strategy: tf.distribute.Strategy | None = None) -> None:
        super().__init__(strategy)
        self.progress = FitProgress()
        self.backup_writer = BackgroundWriter()

    @functools.cached_property
    def _is_evaluator(self) -> bool:
        # Read once: `train_on_batch` comes here at each step.
        return roles.is_evaluator()

    def train(self, original: Original, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if self._is_evaluator:
            roles.refuse_training(original.__name__)
        plan_request.before_training(self.strategy, original, model, args, kwargs)
        if original.__name__ != "fit":
            return original(model, *args, **kwargs)
        self.backup_writer.wait()
        # A callback may train another model.
        task = self.strategy.task
        name = "a process" if task is None else task.name
        outer, self.progress = self.progress, FitProgress(name)
        is_chief = self.strategy.is_chief
        self.progress.begin(original, model, args, kwargs, is_chief)
        try:
            return original(model, *args, **kwargs)
        finally:
            ended, self.progress = self.progress, outer
            self.preemption.unwatch(outer)
            ended.end(model)
            if ended.folders:
                self.backup_writer.wait()
                ended.release_folders()

    # Backups.

    @property
    def control(self) -> ControlPlane | None:
        """Control plane between the workers that run the script, or None."""
        return None

    preemption = functools.cached_property(lambda self: Preemption.of(self.strategy, self.control))

    @property
    def worker_state(self) -> WorkerState:
        """State that workers keep from step to step."""
        raise NotImplementedError

    @functools.cached_property
    def worker_files(self) -> WorkerFiles:
        """Files of that state, beside a backup."""
        return WorkerFiles(self.strategy, self.worker_state)

    @functools.cached_property
    def backup_tables(self) -> BackupTables:
        """Tables that servers write to backups."""
        return BackupTables()

    @property
    def updating(self) -> Any:
        """Scheduler of optimizer steps, according to the strategy's `updates`."""
        raise NotImplementedError

    def settle(self, model: keras.Model) -> None:
        """Gives all workers the same weights, or servers theirs, if they step alone."""
        updates = self.strategy.updates
        if updates is not None and updates.local:
            # Also those that are no attributes, or of the model that this one is a part of.
            others = self.updating.training(model.trainable_variables)
            for optimizer in [*optimizers_of(model).values(), *others]:
                self.updating.finish(optimizer)

    def broadcast_restored(self, variables: Iterable[keras.Variable | tf.Variable]) -> None:
        """Gives all workers what the chief has read into variables."""

    def save_backup(self, original: Original, callback: keras.callbacks.BackupAndRestore) -> Any:
        save = functools.partial(backup_callback.save, self, original, callback)
        return None if self.progress.defer(save) else save()

    def restore_backup(
        self,
        original: Original,
        callback: keras.callbacks.BackupAndRestore,
        logs: dict[str, Any] | None = None,
    ) -> Any:
        return backup_callback.restore(self, original, callback, logs)

    def end_backup(
        self,
        original: Original,
        callback: keras.callbacks.BackupAndRestore,
        logs: dict[str, Any] | None = None,
    ) -> Any:
        return backup_callback.end(self, original, callback, logs)

    def attributes_to_skip(self, original: Original, obj_type: str) -> set[str]:
        return model_saving.attributes_to_skip(original, obj_type)

    def begin_iteration(self, original: Original, iterator: Any) -> Any:
        result = original(iterator)
        before = self.progress.begin_iteration(iterator)
        if before is not None:
            self.skip_data(iterator, *before)
        return result

    def data_position(self, iterator: Any) -> Any:
        """Position in the data to save, beside the numbers of batches and epochs.

        Args:
            iterator: Keras's epoch iterator.

        Returns:
            What can be turned into JSON.
        """
        return None

    def skip_data(self, iterator: Any, epochs: int, batches: int, position: Any) -> None:
        """Brings an epoch iterator, which has begun to iterate, to where training goes on.

        Args:
            iterator: Keras's epoch iterator.
            epochs: How many epochs come before.
            batches: How many batches of the present epoch do.
            position: What `data_position` has returned there.
        """
        data_position.skip(iterator, epochs, batches)

    def end_of_training_epoch(
        self, original: Original, model: keras.Model, logs: dict[str, Any] | None
    ) -> dict[str, Any]:
        if self.progress.has_resumed and not logs:
            # An epoch of which nothing was left to train.
            logs = model.get_metrics_result()
        return original(model, logs)

    # Epochs. Keras counts the steps of the first epoch where data do not say how many they are, and
    # takes no more in later ones. Data that come shuffled out over workers, or from a service, have
    # another number in each epoch.

    def enumerate_steps(self, original: Original, iterator: Any) -> Iterator[Any]:
        iterator._num_batches = iterator.data_adapter.num_batches
        return original(iterator)

    def warn_of_early_end(self, original: Original, iterator: Any) -> Any:
        if iterator._steps_seen <= iterator.steps_per_execution:
            unknown_length.check_rows_came(iterator.data_adapter)
        elif iterator.steps_per_epoch is None and iterator.data_adapter.num_batches is None:
            return None  # this is how data of unknown length end
        return original(iterator)

    def end_progress(
        self,
        original: Original,
        callback: keras.callbacks.ProgbarLogger,
        epoch: int,
        logs: dict[str, Any] | None = None,
    ) -> None:
        has_no_target = callback.target is None
        original(callback, epoch, logs)
        if has_no_target:
            callback.target = None

    def save(
        self,
        original: Original,
        model: keras.Model,
        filepath: Any,
        overwrite: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return model_saving.save_in_place(original, model, filepath, overwrite, *args, **kwargs)

    # Optimizers.

    def build_optimizer(
        self,
        original: Original,
        optimizer: keras.optimizers.Optimizer,
        variables: Sequence[keras.Variable],
    ) -> Any:
        if tf.inside_function():
            # By a step, which nobody but its train_step may know to use it.
            self.progress.optimizers.append(optimizer)
        return original(optimizer, variables)

    # Callbacks.

    def set_callbacks_model(
        self, original: Original, callbacks: keras.callbacks.CallbackList, model: keras.Model
    ) -> Any:
        step_report.add(callbacks)
        return original(callbacks, model)

    def begin_training(
        self,
        original: Original,
        callbacks: keras.callbacks.CallbackList,
        logs: dict[str, Any] | None = None,
    ) -> Any:
        with self.progress.beginning(callbacks):
            result = original(callbacks, logs)
        self.preemption.watch(self.progress)
        return result

    def begin_epoch(
        self,
        original: Original,
        callbacks: keras.callbacks.CallbackList,
        epoch: int,
        logs: dict[str, Any] | None = None,
    ) -> None:
        original(callbacks, epoch, logs)
        self.progress.begin_epoch(callbacks._model, epoch)

    def end_batch(
        self,
        original: Original,
        callbacks: keras.callbacks.CallbackList,
        batch: int,
        logs: dict[str, Any] | None = None,
    ) -> None:
        self.progress.batch = batch + 1
        self.progress.check_optimizers(callbacks.model)
        with self.progress.collecting():
            original(callbacks, batch, logs)
        if self.control is not None and callbacks.model.stop_training:
            self.control.post_stop(self.strategy.progress.steps, self.progress.at)
        self.preemption.check(self.progress, callbacks, self.save_now)

    def save_now(self, callbacks: keras.callbacks.CallbackList) -> None:
        """Saves the state of `fit`."""
        for backup in self.progress.backups:
            backup._save_model()
        self.backup_writer.finish()

    def end_epoch(
        self,
        original: Original,
        callbacks: keras.callbacks.CallbackList,
        epoch: int,
        logs: dict[str, Any] | None = None,
    ) -> None:
        self.progress.epoch, self.progress.batch = epoch + 1, 0
        with self.progress.collecting():
            original(callbacks, epoch, logs)
        epoch_votes.exchange(self.control, callbacks)

    # Variables.

    def make_variable(
        self, original: Original, variable: keras.Variable, *args: Any, **kwargs: Any
    ) -> Any:
        variable._made_by = weakref.ref(self)
        if stateless_scope.in_stateless_scope():
            return original(variable, *args, **kwargs)
        with lifted(self.strategy):
            return original(variable, *args, **kwargs)

    def to_float(self, original: Original, variable: keras.Variable) -> float:
        return _to_number(float, original, variable)

    def to_int(self, original: Original, variable: keras.Variable) -> int:
        return _to_number(int, original, variable)

    def reads_rows(self, variable: keras.Variable) -> bool:
        """Whether rows of a Keras variable are looked up without reading all of it."""
        return False

    def read_rows(
        self,
        original: Original,
        variable: keras.Variable,
        indices: tf.Tensor,
        name: str | None = None,
    ) -> tf.Tensor:
        if not self.reads_rows(variable):
            return original(variable, indices, name)
        return variable._maybe_autocast(variable._value.sparse_read(indices, name=name))

    def take(self, original: Original, x: Any, indices: Any, axis: int | None = None) -> Any:
        if axis != 0 or isinstance(indices, tf.SparseTensor) or not self.reads_rows(x):
            return original(x, indices, axis)
        if isinstance(indices, tf.RaggedTensor):
            return indices.with_flat_values(self._rows(x, indices.flat_values))
        return self._rows(x, tf.convert_to_tensor(indices))

    def _rows(self, variable, indices):
        count = tf.cast(variable.shape[0], indices.dtype)
        return variable.sparse_read(tf.where(indices < 0, indices + count, indices))


def _to_number(number, original, variable):
    if isinstance(variable._value, tf.distribute.DistributedValues):
        return number(variable._value.numpy())
    return original(variable)
