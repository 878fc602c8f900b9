"""Base engine of every strategy, also where one replica trains alone."""

from __future__ import annotations

import functools
import inspect
import json
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import tensorflow as tf

from keras_psplus import specs
from keras_psplus.callbacks import CommunicationMonitor, add_step_report
from keras_psplus.cluster.discovery import find
from keras_psplus.cluster.monitor import goodput, step_times, task_report
from keras_psplus.cluster.monitor.step_times import StepTimes
from keras_psplus.core import data_position, models, plan
from keras_psplus.core.backup import backup_callback
from keras_psplus.core.backup.backup_tables import BackupTables
from keras_psplus.core.backup.fit_progress import FitProgress
from keras_psplus.core.base import checks
from keras_psplus.core.base.optimizers import optimizers_of
from keras_psplus.core.base.threads import BackgroundWriter
from keras_psplus.core.jobs.preemption import Preemption
from keras_psplus.core.models import lifted
from keras_psplus.core.worker_state import WorkerFiles
from keras_psplus.engine import Call, Engine, answers
from keras_psplus.keras_internals.keras_parts import stateless_scope, trainer
from keras_psplus.log import logger

if TYPE_CHECKING:
    import keras

    from keras_psplus.cluster.config import TaskConfig
    from keras_psplus.cluster.monitor.progress import Progress
    from keras_psplus.communication import Communication
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

    _times = functools.cached_property(lambda self: EpochTimes(self.strategy))

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
                return backup_callback.save(self, event.owner)

        return None if self.progress.defer(save) else save()

    @answers("restore")
    def _restore(self, event: Call) -> Any:
        logs = event.get("logs")
        return backup_callback.restore(self, event.original, event.owner, logs)

    @answers("end_backup")
    def _end_backup(self, event: Call) -> None:
        backup_callback.end(self, event.owner)

    def data_position(self, iterator: Any) -> Any:
        """Position in the data to save, beside the numbers of batches and epochs."""
        return None

    def skip_data(self, iterator: Any, epochs: int, batches: int, position: Any) -> None:
        """Brings an epoch iterator, which has begun to iterate, to where training goes on."""
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
        return models.save_in_place(call)

    # Callbacks.

    @answers("set_model")
    def _set_model(self, event: Call) -> Any:
        add_step_report(event.owner)
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
        all_times = exchange(self.control, event.owner, self._times.packed())
        compare(all_times, event.get("epoch") + 1, self.strategy.is_chief)

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
                "which every replica would make by itself. Use HybridStrategy or "
                "ParameterServerStrategy of keras_psplus, whose parameter servers share it, or one "
                "process with one device. "
                f"Received: the table '{call.owner.path}'"
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


# Base class of all strategies: who they are, and the state of their workers.


class StrategyBase:
    """Base class of strategies; their constructors set the private attributes."""

    _task: TaskConfig | None
    # Arguments of the constructor, for `repr`.
    _options: dict[str, Any]
    _progress: Progress
    _communication: Communication
    _engine: Any

    def __new__(cls, *args: Any, **options: Any) -> Self:
        known = inspect.signature(cls.__init__).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in known.values())
        for name in () if takes_all else options:
            if name not in known:
                near = specs.nearest(name, known)
                hint = f" Did you mean `{near}`?" if near else ""
                raise TypeError(
                    f"{cls.__name__} has no argument `{name}`.{hint} "
                    f"Received: {name}={options[name]!r}"
                )
        data_position.releaser.spares_objects = True
        return super().__new__(cls)

    def __repr__(self) -> str:
        given = [f"{n}={v!r}" for n, v in self._options.items() if v not in (None, False)]
        where = "no cluster"
        if self._task is not None:
            jobs = ", ".join(f"{len(tasks)} {job}" for job, tasks in self._task.cluster.items())
            where = f"{self._task.name} of {jobs}"
        return f"<{type(self).__name__}({', '.join(given)}): {where}>"

    @property
    def engine(self) -> StrategyEngine:
        """Engine of the strategy, a `keras_psplus.engine.Engine`."""
        engine: StrategyEngine = self._engine
        return engine

    @property
    def task(self) -> TaskConfig | None:
        """`keras_psplus.cluster.TaskConfig` of this process; None if it has none."""
        return self._task

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints and logs; a chief alone runs the script."""
        return True

    @property
    def progress(self) -> Progress:
        """Progress of this process, a `keras_psplus.cluster.monitor.progress.Progress`."""
        return self._progress

    @property
    def communication(self) -> Communication:
        """Communication costs of training, a `keras_psplus.communication.Communication`."""
        return self._communication

    def state_dict(self, optimizer: keras.optimizers.Optimizer) -> dict[str, np.ndarray]:
        """Returns what workers keep from step to step for an optimizer.

        That is what `compression=` and `updates=` need: residuals, factors, sums of gradients,
        counters, and the momenta of workers that step alone. No `.keras` file holds it.
        `BackupAndRestore` saves and restores it. To save it beside checkpoints of your own, call
        `finish_updates` first if the strategy has `updates`.

        Under all-reduce, each worker has its own part: call it on all of them, and save each
        result. A chief has that of all workers.

        Args:
            optimizer: The model's optimizer.

        Returns:
            Dict from names to NumPy arrays; empty if nothing is kept, or before the first step.

        Raises:
            ValueError: If it is no optimizer of this strategy.

        Example:

        ```python
        state = strategy.state_dict(model.optimizer)
        np.savez(f"{folder}/state-{strategy.task.name}.npz", **state)
        ```
        """
        return self._state_of(optimizer).state_dict(optimizer)

    def load_state_dict(
        self, optimizer: keras.optimizers.Optimizer, state: Mapping[str, np.ndarray]
    ) -> None:
        """Goes on from what `state_dict` has returned, also before the first step.

        Under all-reduce, call it on all workers, on each with its own result. States are made by
        the first step, which then raises for values that do not fit.

        Args:
            optimizer: The model's optimizer.
            state: Mapping from names to arrays, such as `np.load` returns.

        Raises:
            ValueError: If it is no optimizer of this strategy, or the state is one of another
                number of workers, of another model, compressor or `updates`, or lacks a name.

        Example:

        ```python
        with np.load(f"{folder}/state-{strategy.task.name}.npz") as state:
            strategy.load_state_dict(model.optimizer, state)
        ```
        """
        self._state_of(optimizer).load_state_dict(optimizer, state)

    def _state_of(self, optimizer: keras.optimizers.Optimizer) -> WorkerState:
        checks.check_optimizer(optimizer)
        if optimizer._distribution_strategy is not self:
            checks.refuse_optimizer(optimizer)
        state: WorkerState = self.engine.worker_state
        return state


# Step times of an epoch, and what all workers exchange at its end.


# An epoch that loses less is not worth a line.
_LEAST_LOST_SECONDS = 1.0


class EpochTimes:
    """Step times of the present epoch: of this process, or of a chief's workers."""

    def __init__(self, strategy: tf.distribute.Strategy | None) -> None:
        self._progress = getattr(strategy, "progress", None)
        self._begun: dict[str, StepTimes] = {}
        self._times: dict[str, StepTimes] = {}

    def begin(self) -> None:
        if self._progress is not None:
            self._progress.begin_epoch()
            self._begun, self._times = self._progress.times(), {}

    def end(self) -> None:
        """The steps of an epoch are done; validation and callbacks may follow."""
        if self._progress is not None:
            none = StepTimes()
            now = self._progress.times()
            self._times = {n: each.since(self._begun.get(n, none)) for n, each in now.items()}

    def packed(self) -> str:
        """Text of the epoch's times, for the other workers."""
        return json.dumps({name: times.packed() for name, times in self._times.items()})


def exchange(
    control: ControlPlane | None, callbacks: keras.callbacks.CallbackList, times: str
) -> list[str]:
    """Stops all workers if one of them stops, and lets monitors know all workers' seconds.

    Args:
        callbacks: The callbacks of `fit`, which have heard of the end of the epoch.
        times: Text of this worker's step times.
    """
    monitors = [c for c in callbacks.callbacks if isinstance(c, CommunicationMonitor)]
    seconds = max((c.seconds for c in monitors if c.seconds is not None), default=None)
    all_seconds, all_times = [seconds], [times]
    if control is not None:
        # A callback that stops one worker only would leave the others waiting for its gradients.
        # All workers come here, also those whose callbacks have nothing to say.
        vote = json.dumps([bool(callbacks.model.stop_training), seconds, times])
        votes = [json.loads(v) for v in control.exchange("epoch end", vote)]
        callbacks.model.stop_training = any(stops for stops, _, _ in votes)
        all_seconds = [seconds for _, seconds, _ in votes]
        all_times = [times for _, _, times in votes]
    for monitor in monitors:
        monitor.write(all_seconds)
    return all_times


def compare(packed: list[str], epoch: int, is_chief: bool) -> None:
    """Has the chief name the task that held the others up in an epoch."""
    if not is_chief:
        return
    times = {
        name: step_times.unpacked(fields)
        for text in packed
        for name, fields in json.loads(text).items()
    }
    slowest = step_times.slowest(times)
    report = task_report.current()
    if report is not None and times:
        report.step_times(epoch, step_times.apart(times), slowest)
    if slowest is None:
        return
    steps = max(each.steps for each in times.values())
    # Steps of a few milliseconds differ by chance.
    if steps * (slowest.seconds - slowest.usual) >= _LEAST_LOST_SECONDS:
        logger.warning("epoch %d, slowest: %s", epoch, slowest)
