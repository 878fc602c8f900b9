"""Base engine of every strategy, also where one replica trains alone."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_psplus.callbacks import step_report
from keras_psplus.cluster.discovery import find
from keras_psplus.cluster.monitor import goodput, task_report
from keras_psplus.core import plan
from keras_psplus.core.backup import backup_callback
from keras_psplus.core.backup.backup_tables import BackupTables
from keras_psplus.core.backup.fit_progress import FitProgress
from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.core.base.threads import BackgroundWriter
from keras_psplus.core.data import data_position
from keras_psplus.core.jobs import epoch_times
from keras_psplus.core.jobs.preemption import Preemption
from keras_psplus.core.models import model_saving
from keras_psplus.core.models.building import lifted
from keras_psplus.core.worker_files import WorkerFiles
from keras_psplus.engine import Call, Engine, answers
from keras_psplus.keras_internals.keras_parts import stateless_scope, trainer

if TYPE_CHECKING:
    import keras

    from keras_psplus.core.jobs.control import ControlPlane
    from keras_psplus.core.worker_state import WorkerState


class StrategyEngine(Engine):
    """Backups that survive a kill, epochs as long as their data, and variables as numbers."""

    # Whether each process that trains has the weights, or is far from some of them.
    has_weights_in_memory = False

    @property
    def compiles_by_default(self) -> bool:
        """Whether `jit_compile="auto"` has XLA compile models, or parts of them."""
        return False

    def __init__(self, strategy: tf.distribute.Strategy | None = None) -> None:
        super().__init__(strategy)
        self.progress = FitProgress()
        self.backup_writer = BackgroundWriter()

    @functools.cached_property
    def _is_evaluator(self) -> bool:
        # Read once: `train_on_batch` comes here at each step.
        return find.is_evaluator()

    @answers("fit", "train_on_batch")
    def _train(self, call: Call) -> Any:
        if self._is_evaluator:
            find.refuse_training(call.name)
        plan.before_training(self.strategy, call)
        if call.name != "fit":
            return call.proceed()
        self.backup_writer.wait()
        # A callback may train another model.
        task = self.strategy.task
        name = "a process" if task is None else task.name
        outer, self.progress = self.progress, FitProgress(name)
        is_chief = self.strategy.is_chief
        self.progress.begin(call.original, call.owner, call.args, call.kwargs, is_chief)
        try:
            return call.proceed()
        finally:
            ended, self.progress = self.progress, outer
            self.preemption.unwatch(outer)
            ended.end(call.owner)
            if ended.folders:
                self.backup_writer.wait()
                ended.release_folders()

    def resolve_auto_jit(self, model: keras.Model, jit_compile: bool | str) -> None:
        """Decides what the default of `compile` means: Keras leaves models of strategies alone."""
        if jit_compile == "auto" and not model.run_eagerly:
            model.jit_compile = self.compiles_by_default and trainer.model_supports_jit(model)

    @answers("evaluate", "test_on_batch", "predict", "predict_on_batch")
    def _evaluate(self, call: Call) -> Any:
        outer, self.evaluates = self.evaluates, True
        try:
            return call.proceed()
        finally:
            self.evaluates = outer

    # Backups and reports.

    _times = functools.cached_property(lambda self: epoch_times.EpochTimes(self.strategy))

    @property
    def control(self) -> ControlPlane | None:
        """Control plane between the workers that run the script, or None."""
        return getattr(self.strategy.extended, "control", None)

    preemption = functools.cached_property(lambda self: Preemption.of(self.strategy, self.control))

    @property
    def worker_state(self) -> WorkerState:
        """State that workers keep from step to step."""
        state: WorkerState = self.strategy.extended.worker_state
        return state

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
        return self.strategy.extended.updating

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

    def place(self, model: keras.Model) -> None:
        """Decides on all workers where variables lie, before the chief reads them from a file."""

    # Whether a worker updates parts of weights that a step has gradients of.
    cuts_weights = False

    def parts_of_weights(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """Gradients by weights, as a step has them, as those of what this worker updates."""
        return grads

    def of_whole_weights(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """The inverse of `parts_of_weights`."""
        return grads

    @answers("backup")
    def _backup(self, event: Call) -> Any:
        def save() -> Any:
            with task_report.spending(goodput.SAVES):
                return backup_callback.save(self, event.original, event.owner)

        return None if self.progress.defer(save) else save()

    @answers("restore")
    def _restore(self, event: Call) -> Any:
        logs = event.get("logs")
        return backup_callback.restore(self, event.original, event.owner, logs)

    @answers("end_backup")
    def _end_backup(self, event: Call) -> None:
        backup_callback.end(self, event.owner)

    def data_position(self, iterator: Any) -> Any:
        """Position in the data to save, beside the numbers of batches and epochs.

        Returns:
            What can be turned into JSON.
        """
        return None

    def skip_data(self, iterator: Any, epochs: int, batches: int, position: Any) -> None:
        """Brings an epoch iterator, which has begun to iterate, to where training goes on.

        Args:
            epochs: How many epochs come before.
            batches: How many batches of the present epoch do.
            position: What `data_position` has returned there.
        """
        data_position.skip(iterator, epochs, batches)

    @answers("steps_end", "test_steps_end")
    def _end_steps(self, event: Call) -> dict[str, Any]:
        given = {}
        if self.progress.has_resumed and not event.get("logs"):
            # An epoch of which nothing was left to train.
            given["logs"] = event.owner.get_metrics_result()
        logs: dict[str, Any] = event.proceed(**given)
        if event.name == "steps_end":
            self._times.end()
        return logs

    @answers("save", "save_weights")
    def _save(self, call: Call) -> Any:
        return model_saving.save_in_place(call)

    # Callbacks.

    @answers("set_model")
    def _set_model(self, event: Call) -> Any:
        step_report.add(event.owner)
        return event.proceed()

    @answers("train_begin")
    def _begin_training(self, event: Call) -> Any:
        with self.progress.beginning(event.owner):
            result = event.proceed()
        self.preemption.watch(self.progress, self.are_servers_preempted)
        return result

    @answers("epoch_begin")
    def _begin_epoch(self, event: Call) -> None:
        event.proceed()
        self.progress.begin_epoch(event.owner._model, event.get("epoch"))
        self._times.begin()

    @answers("batch_end")
    def _end_batch(self, event: Call) -> None:
        callbacks, batch = event.owner, event.get("batch")
        self.progress.batch = batch + 1
        self.progress.check_optimizers(callbacks.model)
        with self.progress.collecting():
            event.proceed()
        if self.control is not None and callbacks.model.stop_training:
            self.control.post_stop(self.strategy.progress.steps, self.progress.at)
        self.preemption.check(self.progress, callbacks, self.save_now)

    @property
    def are_servers_preempted(self) -> Callable[[], bool] | None:
        """Function that asks whether a serving process is told to end, or None."""
        return None

    def save_now(self) -> None:
        for backup in self.progress.backups:
            backup._save_model()
        self.backup_writer.finish()

    @answers("epoch_end")
    def _end_epoch(self, event: Call) -> None:
        self.progress.epoch, self.progress.batch = event.get("epoch") + 1, 0
        with self.progress.collecting():
            event.proceed()
        all_times = epoch_times.exchange(self.control, event.owner, self._times.packed())
        epoch_times.compare(all_times, event.get("epoch") + 1, self.strategy.is_chief)

    # Variables.

    @answers("make_variable")
    def _make_variable(self, call: Call) -> Any:
        call.owner._made_by = weakref.ref(self)
        if stateless_scope.in_stateless_scope():
            return call.proceed()
        with lifted(self.strategy):
            return call.proceed()

    @answers("make_table")
    def _make_dynamic_table(self, call: Call) -> Any:
        if self.is_distributed:
            raise ValueError(
                f"{type(self.strategy).__name__} has no place for a DynamicEmbedding's table, "
                "which every worker would make by itself. Use keras_psplus.HybridStrategy, whose "
                f"parameter servers share it. Received: the table '{call.owner.path}'"
            )
        return call.proceed()

    @answers("build_optimizer")
    def _build_optimizer(self, call: Call) -> Any:
        if tf.inside_function():
            # By a step, which nobody but its train_step may know to use it.
            self.progress.optimizers.append(call.owner)
        return call.proceed()

    def reads_rows(self, variable: keras.Variable) -> bool:
        """Whether rows of a Keras variable are looked up without reading all of it."""
        return False

    @answers("sparse_read")
    def _read_rows(self, call: Call) -> tf.Tensor:
        variable = call.owner
        if not self.reads_rows(variable):
            return call.proceed()
        rows = variable._value.sparse_read(call.get("indices"), name=call.get("name"))
        return variable._maybe_autocast(rows)

    @answers("take")
    def _take(self, call: Call) -> Any:
        x, indices = call.owner, call.get("indices")
        is_sparse = isinstance(indices, tf.SparseTensor)
        if call.get("axis") != 0 or is_sparse or not self.reads_rows(x):
            return call.proceed()
        if isinstance(indices, tf.RaggedTensor):
            return indices.with_flat_values(self._rows(x, indices.flat_values))
        return self._rows(x, tf.convert_to_tensor(indices))

    def _rows(self, variable: Any, indices: tf.Tensor) -> tf.Tensor:
        count = tf.cast(variable.shape[0], indices.dtype)
        return variable.sparse_read(tf.where(indices < 0, indices + count, indices))
